"""The lines of `train_step` and `eval_step`: what a step does around the model's forward and backward.

Purpose: one line per reduction, in the order of the IR.  Non-goals: the model (`modules`).
"""

from attrs import frozen

from ..ir import Kind, Op, Program, Region, Type
from ..placements import ends
from .words import DTYPES, axes_word, identifier, literal

LOCALS = set("count share loss part tokens labels gradients norm squares squares_2 squares_3 squares_4".split())
"""What the lines below call their values."""


@frozen
class StepLines:
    """The bodies of the two functions, without indentation."""

    train: tuple[str, ...]
    evaluate: tuple[str, ...]


def step_lines(program: Program) -> StepLines:
    """The bodies for the program's step."""
    return _Lines(program).lines()


class _Lines:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._text: dict[str, str] = {}  # a value of the step → the expression that stands for it
        self._groups: dict[tuple[str, ...], str] = {}
        self._types: dict[str, Type] = {}
        self._lines: list[str] = []
        self._evaluate: list[str] = []

    def lines(self) -> StepLines:
        for stmt in self._program.region.body:
            if isinstance(stmt, Region):
                self._microbatches(stmt)
            else:
                self._types |= {value.name: value.type for value in stmt.outputs}
                getattr(self, f"_{stmt.kind}")(stmt)
        loss, norm, count = (self._text[end.name] for end in self._program.region.yields[:3])
        preamble = ["mesh = state.mesh", *self._preamble(self._groups)] if self._groups else []
        train = [*preamble, *self._lines, f"return Metrics(loss={loss}, norm={norm}, tokens={count})"]
        used = {
            axes: name for axes, name in self._groups.items() if any(f", {name})" in line for line in self._evaluate)
        }
        evaluate = [*self._preamble(used), *self._evaluate, f"return Metrics(loss={loss}, tokens={count})"]
        return StepLines(tuple(train), tuple(evaluate))

    def _preamble(self, groups: dict[tuple[str, ...], str]) -> list[str]:
        return [f"{name} = mesh.axis({', '.join(map(literal, axes))})" for axes, name in groups.items()]

    def _group(self, axes: tuple[str, ...]) -> str:
        if axes not in self._groups:
            self._groups[axes] = identifier(axes_word(axes, self._program), LOCALS | set(self._groups.values()))
        return self._groups[axes]

    def _both(self, line: str) -> None:
        self._lines.append(line)
        self._evaluate.append(line)

    # ---- one method per kind of op at step scope

    def _leaf_chain(self, op: Op) -> None:
        """A parameter's own chain: nothing to do (I→R), or the copy that the state keeps (cast)."""
        assert ends(op)[1].kind is Kind.REPLICATED if op.kind == "coerce" else op.kind == "cast", (
            "emit: a leaf's chain communicates"
        )

    def _cast(self, op: Op) -> None:
        self._leaf_chain(op)

    def _coerce(self, op: Op) -> None:
        source, _ = ends(op)
        if source.kind is not Kind.PARTIAL:
            self._leaf_chain(op)
            return
        text = self._text[op.inputs[0]]
        call = f"all_reduce_({text}, {self._group(op.names('axes'))})"
        elements = self._program.elements(op.outputs[0].type)
        if op.outputs[0].type.dims:
            self._lines.append(f"{call}  # P→I  {elements:,} × {op.outputs[0].type.dtype}")
            call = text
        self._text[op.outputs[0].name] = call

    def _count_valid(self, op: Op) -> None:
        self._text[op.outputs[0].name] = f"count_valid(batch.{op.inputs[0].split('.')[0]})"

    def _reciprocal(self, op: Op) -> None:
        self._both(f"count = {self._text[op.inputs[0]]}  # labels of the step that count")
        dtype = DTYPES[str(op.get("dtype"))]
        self._both(f"share = count.clamp(min=1).to({dtype}).reciprocal()")
        self._text[op.inputs[0]] = "count"
        self._text[op.outputs[0].name] = "share"

    def _microbatches(self, region: Region) -> None:
        loss = region.results[0]
        self._text |= {value.name: value.name for value in region.results}
        zero = "loss = torch.zeros_like(share)"
        names = ", ".join(arg.value.name for arg in region.args)
        self._lines += [
            zero,
            f"for {names} in batch.microbatches():",
            f"    part = model({names})  # forward",
            "    (part * share).backward()  # backward",
            "    loss += part.detach()",
        ]
        self._evaluate += [zero, f"for {names} in batch.microbatches():", f"    loss += model({names})"]
        self._text[loss.name] = "loss"

    def _mul(self, op: Op) -> None:
        self._both(f"loss = {self._text[op.inputs[0]]} * share  # mean over the step's labels")
        self._text[op.outputs[0].name] = "loss"

    def _pack(self, op: Op) -> None:
        if "gradients = state.gradients()" not in self._lines:
            self._lines.append("gradients = state.gradients()")
        bucket = next(b for b in self._program.buckets if b.type.dims == (op.get("dim"),))
        self._text[op.outputs[0].name] = f"gradients[{literal(bucket.name)}]"

    def _sum_squares(self, op: Op) -> None:
        self._text[op.outputs[0].name] = f"sum_squares({', '.join(self._text[name] for name in op.inputs)})"

    def _grad_norm(self, op: Op) -> None:
        names = [f"squares_{i}" if i > 1 else "squares" for i in range(1, len(op.inputs) + 1)]
        self._lines += [f"{name} = {self._text[part]}" for name, part in zip(names, op.inputs, strict=True)]
        total = names[0] if len(names) == 1 else f"({' + '.join(names)})"
        self._lines.append(f"norm = {total}.sqrt()")
        self._text[op.outputs[0].name] = "norm"

    def _clip_scale(self, op: Op) -> None:
        limit = op.get("max")
        scale = f"scale=clip_scale(norm, {limit!r}), " if limit else ""
        self._lines.append(f"state.update(lr, {scale}skip=count == 0)")

    def _update(self, op: Op) -> None:
        """All buckets' updates are one call."""


__all__ = ["StepLines", "step_lines"]
