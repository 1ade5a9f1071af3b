"""The training step around a model: count → microbatches { forward, backward } → norm → clip → update.

In fp16 gradients are those of the loss times the loss scale, which norm and update take out again.
Non-goals: the backward of the model itself (`backward`).
"""

from ...ir import (
    INVARIANT,
    MICROBATCHES,
    REPLICATED,
    Arg,
    Enter,
    Kind,
    Leave,
    Op,
    Param,
    Program,
    Region,
    Value,
    Yield,
    base,
    ops_in,
)
from ...ir.placements import Step
from .backward import Backward
from .builder import Book, Writer


class TrainingStep(Writer):
    """Writes the region `step` of a program whose region is a model."""

    def __init__(self, program: Program) -> None:
        super().__init__(Book(program))
        self._program, self._model, self._span = program, program.region, program.region.span
        self._leaves = [op for op in ops_in(self._model.body) if op.kind == "leaf"]
        owners = [op.inputs[0] for op in self._leaves]
        assert owners == [p.name for p in program.params], "differentiate: leaves and parameters differ"
        self._loss_scale = ""  # of a program that has one

    def region(self) -> Region:
        """The step, which yields loss, gradient norm, count of valid tokens and the new parameters."""
        inputs = [self.book.value(arg.value.name, arg.value.type.stacked(MICROBATCHES)) for arg in self._model.args]
        self.out += self._leaves
        labels = next(value.name for value in inputs if base(value.name) == "labels")
        (counted,) = self.write("count_valid", [labels], ["num_tokens"], self._span)
        count = self.reduced(counted, self._span)
        loss_type = self.book.types[self._model.yields[0].name]
        (inv_num_tokens,) = self.write("reciprocal", [count], ["inv_num_tokens"], self._span, dtype=loss_type.dtype)
        loss, grads = self._microbatches(inputs, self._scaled(inv_num_tokens))
        (mean,) = self.write("mul", [self.reduced(loss, self._span), inv_num_tokens], [loss], self._span)
        norm, updated = self._update(grads, count)
        ends = tuple(Yield(name, Leave.LAST) for name in (mean, norm, count, *updated))
        args = tuple(Arg(value, value.name, Enter.EACH) for value in inputs)
        return Region("step", tuple(self.out), args, ends, span=self._span)

    def _scaled(self, inv_num_tokens: str) -> str:
        """The gradient of the step's loss, times the loss scale in fp16."""
        if self._program.train.precision != "fp16":
            return inv_num_tokens
        (self._loss_scale,) = self.write("loss_scale", [], ["loss_scale"], self._span)
        return self.write("mul", [inv_num_tokens, self._loss_scale], ["seed"], self._span)[0]

    def _microbatches(self, inputs: list[Value], seed: str) -> tuple[str, list[str]]:
        """Writes the region of all microbatches; returns the sums of loss and of the leaves' gradients."""
        loss = self._model.yields[0].name
        back = Backward(self.book)
        back.add(loss, self._seed(back, loss, seed))
        forward = back.body([stmt for stmt in self._model.body if not (isinstance(stmt, Op) and stmt.kind == "leaf")])
        grads = [back.total(op.outputs[0].name, self._span) or "" for op in self._leaves]
        assert all(grads), "differentiate: a parameter has no gradient"
        blocks = (
            Region("forward", forward, span=self._span),
            Region("backward", tuple(back.out), span=self._span),
        )
        ends = tuple(Yield(name, Leave.SUM) for name in (loss, *grads))
        results = tuple(self.book.value(end.name, self.book.types[end.name]) for end in ends)
        args = tuple(Arg(a.value, value.name, Enter.EACH) for a, value in zip(self._model.args, inputs, strict=True))
        self.out.append(Region("microbatches", blocks, args, ends, results, MICROBATCHES, span=self._span))
        return results[0].name, [value.name for value in results[1:]]

    def _seed(self, back: Backward, loss: str, seed: str) -> str:
        """The gradient of a microbatch's sum of token losses: one over the step's count of valid tokens."""
        axes = self.book.types[loss].axes_in(Kind.PARTIAL)
        return back.coerce(seed, Step(axes, INVARIANT, REPLICATED), seed, self._span) if axes else seed

    def _update(self, grads: list[str], count: str) -> tuple[str, list[str]]:
        """Writes norm, clipping and update; returns the norm and the new parameters."""
        params = self._program.params
        final = [self._final(*each) for each in zip(self._leaves, grads, params, strict=True)]
        norm = self._norm(final)
        clip = float(self._program.train.optimizer.clip)
        (scale,) = self.write("clip_scale", [norm], ["scale"], self._span, max=clip)
        if self._loss_scale:
            (scale,) = self.write("unscaled", [scale, self._loss_scale], [scale], self._span)
            (count,) = self.write("if_finite", [count, norm], [count], self._span)
        updates = zip(final, params, strict=True)
        return norm, [self.write("update", [g, scale, count, p.name], [p.name], p.span)[0] for g, p in updates]

    def _final(self, leaf: Op, grad: str, param: Param) -> str:
        """The gradient as the update takes it."""
        return self.append(Op("leaf_grad", (grad,), (self.book.value(grad, param.type),), span=leaf.span))[0]

    def _norm(self, grads: list[str]) -> str:
        """Squares are added over the axes on which a gradient is sharded, and not over those where it is invariant."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in grads:
            groups.setdefault(self.book.types[name].axes_in(Kind.SHARDED), []).append(name)
        squares = [self._squares(names) for names in groups.values()]
        if self._loss_scale:
            return self.write("unscaled_norm", [self._loss_scale, *squares], ["grad_norm"], self._span)[0]
        return self.write("grad_norm", squares, ["grad_norm"], self._span)[0]

    def _squares(self, grads: list[str]) -> str:
        return self.reduced(self.write("sum_squares", grads, ["grad_norm_sq"], self._span)[0], self._span)
