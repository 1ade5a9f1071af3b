"""The training step around a model: count → microbatches { forward, backward } → norm → clip →
update.

In fp16 gradients are the gradients of the loss times the loss scale; norm and update divide by it.
Non-goals: the backward of the model itself (`backward`).
"""

from ...ir import (
    INVARIANT,
    MICROBATCHES,
    REPLICATED,
    Arg,
    Buffer,
    Enter,
    Kind,
    Leave,
    Op,
    Param,
    Program,
    Region,
    Stmt,
    Type,
    Value,
    Yield,
    base,
    ops_in,
)
from ...ir.placements import Step
from ...ops.builder import OpBuilder
from .backward import Backward


class TrainingStep(OpBuilder):
    """Writes the region `step` of a program whose region is a model."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._model = program.region
        self._leaves = [op for op in ops_in(self._model.body) if op.kind == "leaf"]
        owners = [op.inputs[0] for op in self._leaves]
        assert owners == [p.name for p in program.params], (
            "differentiate: leaves and parameters differ"
        )
        self._loss_scale = ""  # of a program that has one

    def region(self) -> Region:
        """The step: it yields loss, gradient norm, count of labels, a routers' loss, loads and
        the new parameters.
        """
        inputs = list[Value]()
        for arg in self._model.args:
            stacked = arg.value.type.stack_along(MICROBATCHES)
            inputs.append(self.value(arg.value.name, stacked))
        self.body += self._leaves
        labels = next(value.name for value in inputs if base(value.name) == "labels")
        counted = self.write("count_valid", [labels], "num_tokens")
        count = self.reduce(counted)
        loss_type = self.types[self._model.yields[0].name]
        inv_num_tokens = self.write("reciprocal", [count], "inv_num_tokens", dtype=loss_type.dtype)
        (loss, *others), grads = self._microbatches(inputs, self._gradient_of_loss(inv_num_tokens))
        mean = self.write("mul", [self.reduce(loss), inv_num_tokens], loss)
        others = [self.reduce(name) for name in others]
        norm, updated = self._update(grads, count, mean, others[self.program.losses - 1 :])
        ends = tuple(Yield(name, Leave.LAST) for name in (mean, norm, count, *others, *updated))
        args = tuple(Arg(value, value.name, Enter.EACH) for value in inputs)
        return Region("step", tuple(self.body), args, ends, span=self.span)

    def _gradient_of_loss(self, inv_num_tokens: str) -> str:
        """The gradient of the step's loss, times the loss scale in fp16."""
        if self.program.train.precision != "fp16":
            return inv_num_tokens
        self._loss_scale = self.write("loss_scale", [], "loss_scale")
        return self.write("mul", [inv_num_tokens, self._loss_scale], "seed")

    def _microbatches(self, inputs: list[Value], seed: str) -> tuple[list[str], list[str]]:
        """Writes the region of all microbatches; returns the sums of losses and loads, and the
        sums of the leaves' gradients.
        """
        summed_names = [end.name for end in self._model.yields]
        losses, back = summed_names[: self.program.losses], Backward(self)
        seeds = [seed]
        for name in losses[1:]:
            seeds.append(self._one(name))
        for loss, gradient in zip(losses, seeds, strict=True):
            axes = self.types[loss].axes_in(Kind.PARTIAL)
            back.add(loss, back.coerce(gradient, Step(axes, INVARIANT, REPLICATED)))
        body = list[Stmt]()
        for stmt in self._model.body:
            if not isinstance(stmt, Op) or stmt.kind != "leaf":
                body.append(stmt)
        forward = back.differentiate_body(body)
        grads = [back.total(op.outputs[0].name) or "" for op in self._leaves]
        assert all(grads), "differentiate: a parameter has no gradient"
        blocks = (
            Region("forward", forward, span=self.span),
            Region("backward", tuple(back.body), span=self.span),
        )
        ends = tuple(Yield(name, Leave.SUM) for name in (*summed_names, *grads))
        results = tuple(self.value(end.name, self.types[end.name]) for end in ends)
        args = list[Arg]()
        for arg, stacked in zip(self._model.args, inputs, strict=True):
            args.append(Arg(arg.value, stacked.name, Enter.EACH))
        region = Region(
            "microbatches", blocks, tuple(args), ends, results, MICROBATCHES, span=self.span
        )
        self.body.append(region)
        names = [value.name for value in results]
        return names[: len(summed_names)], names[len(summed_names) :]

    def _one(self, loss: str) -> str:
        """The gradient of a loss that counts as it is: one, times the loss scale in fp16."""
        if self._loss_scale:
            return self._loss_scale
        value = self.value("one", Type(self.types[loss].dtype, ()))
        return self.append(Op("one", (), (value,), span=self.span))

    def _update(
        self, grads: list[str], count: str, loss: str, loads: list[str]
    ) -> tuple[str, list[str]]:
        """Writes norm, clipping and update; returns the norm, and the new parameters and
        buffers.
        """
        params = self.program.params
        final = list[str]()
        for leaf, grad, param in zip(self._leaves, grads, params, strict=True):
            value = self.value(grad, param.type)
            final.append(self.append(Op("leaf_grad", (grad,), (value,), span=leaf.span)))
        norm = self._norm(final)
        clip = float(self.program.train.optimizer.clip)
        scale = self.write("clip_scale", [norm], "scale", max=clip)
        if self._loss_scale:
            scale = self.write("unscaled", [scale, self._loss_scale], scale)
        count = self.write("if_finite", [count, norm, loss], count)
        if deviations := self.program.watch.get_loss_limit:
            limit = self.write("loss_limit", [], "loss_limit", deviations=deviations)
            count = self.write("if_below", [count, loss, limit], count)
        updated = list[str]()
        for param, grad in zip(params, final, strict=True):
            updated.append(self._write_update(param, grad, scale, count))
        for buffer in self.program.buffers:
            updated.append(self._write_balance(buffer, loads[buffer.route], count))
        return norm, updated

    def _write_balance(self, buffer: Buffer, load: str, count: str) -> str:
        due = Value(buffer.name, buffer.type)
        inputs = (buffer.name, load, count)
        attrs = (("rate", buffer.rate),)
        return self.append_typed(Op("balanced", inputs, (due,), attrs, span=buffer.span))[0]

    def _write_update(self, param: Param, grad: str, scale: str, count: str) -> str:
        due = Value(param.name, param.type)
        inputs = (grad, scale, count, param.name)
        return self.append_typed(Op("update", inputs, (due,), span=param.span))[0]

    def _norm(self, grads: list[str]) -> str:
        """Squares are added over the axes on which a gradient is sharded, and not over the axes
        on which it is invariant.
        """
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in grads:
            groups.setdefault(self.types[name].axes_in(Kind.SHARDED), []).append(name)
        squares = list[str]()
        for names in groups.values():
            squares.append(self.reduce(self.write("sum_squares", names, "grad_norm_sq")))
        if self._loss_scale:
            return self.write("unscaled_norm", [self._loss_scale, *squares], "grad_norm")
        return self.write("grad_norm", squares, "grad_norm")
