"""The lines of `train_step` and `eval_step`: what a step does around the model's forward and backward.

Purpose: one line per reduction, in the order of the IR.  Non-goals: the model (`modules`).
"""

from collections.abc import Callable

from attrs import define, field, frozen

from ..ir import Kind, Op, Program, Region, Value, base
from ..ops.dropout import are_draws
from ..placements import ends
from .words import DTYPES, axes_word, identifier, literal

LOCALS = {
    *("count", "share", "loss", "part", "tokens", "labels", "documents", "draws", "gradients", "norm", "squares"),
    "weights",
}
"""What the lines below call their values."""


@frozen
class StepLines:
    """The bodies of the two functions, without indentation."""

    train: tuple[str, ...]
    evaluate: tuple[str, ...]


def step_lines(program: Program) -> StepLines:
    """The bodies for the program's step."""
    step = _Step(program)
    for stmt in program.region.body:
        if isinstance(stmt, Region):
            step.microbatches(stmt)
        else:
            WRITERS[stmt.kind](step, stmt)
    loss, norm, count = (step.text[end.name] for end in program.region.yields[:3])
    step.train.lines.append(f"return Metrics(loss={loss}, norm={norm}, tokens={count})")
    step.evaluate.lines.append(f"return Metrics(loss={loss}, tokens={count})")
    return StepLines(tuple(step.train.all()), tuple(step.evaluate.all()))


@define
class _Function:
    """The lines of one function, and the groups over axes that it asks the mesh for."""

    groups: dict[str, tuple[str, ...]] = field(factory=dict[str, tuple[str, ...]])
    lines: list[str] = field(factory=list[str])

    def all(self) -> list[str]:
        """The groups first."""
        groups = [f"{name} = mesh.axis({', '.join(map(literal, axes))})" for name, axes in self.groups.items()]
        return [*(["mesh = state.mesh"] if groups else []), *groups, *self.lines]


class _Step:
    def __init__(self, program: Program) -> None:
        self._program = program
        self.text: dict[str, str] = {}  # a value of the step → the expression that stands for it
        self.train, self.evaluate = _Function(), _Function()

    def coerce(self, op: Op) -> None:
        """The sum of a scalar stands inside another line, that of a bucket is a line."""
        name, result = op.inputs[0], op.outputs[0]
        text = self.text.get(name, "")
        match [end.kind for end in ends(op)]:
            case [Kind.PARTIAL, Kind.INVARIANT] if not result.type.dims:
                text = f"all_reduce_({text}, {self._group(op)})"
            case [Kind.PARTIAL, Kind.INVARIANT]:
                self.train.lines.append(f"all_reduce_({text}, {self._group(op)})  # P→I  {self._size(result)}")
            case [Kind.PARTIAL, Kind.SHARDED]:
                call = f"reduce_scatter_({text}, {self._group(op)})"
                self.train.lines.append(f"{text} = {call}  # P→S  {self._size(result)}")
            case [Kind.SHARDED, Kind.REPLICATED]:
                self._both(f"all_gather_({text}, {self._group(op)})  # S→R  {self._size(result)}")
            case [Kind.INVARIANT, Kind.SHARDED | Kind.REPLICATED]:
                pass  # what the rank holds of a bucket, and what it uses of a parameter, are there
            case _:
                raise AssertionError(f"emit: nothing does {op.outputs[0].name} at the scope of the step")
        self.text[result.name] = text

    def _size(self, value: Value) -> str:
        return f"{self._program.elements(value.type):,} × {value.type.dtype}"

    def _group(self, op: Op) -> str:
        """The name of the joint group of a reduction; evaluation asks for those of counts and losses only."""
        axes = op.names("axes")
        known = {held: name for name, held in self.train.groups.items()}
        name = known.get(axes) or identifier(axes_word(axes, self._program), LOCALS | set(known.values()))
        self.train.groups[name] = axes
        if base(op.inputs[0]) in ("count", "loss") or ends(op)[0].kind is Kind.SHARDED:
            self.evaluate.groups[name] = axes
        return name

    def count_valid(self, op: Op) -> None:
        self.text[op.outputs[0].name] = f"count_valid(batch.{base(op.inputs[0])})"

    def reciprocal(self, op: Op) -> None:
        self._both(f"count = {self.text[op.inputs[0]]}  # labels of the step that count")
        self._both(f"share = count.clamp(min=1).to({DTYPES[str(op.get('dtype'))]}).reciprocal()")
        self._both("loss = torch.zeros_like(share)")
        self.text |= {op.inputs[0]: "count", op.outputs[0].name: "share"}

    def microbatches(self, region: Region) -> None:
        """Forward, backward and the sum of losses; gradients add up in the state's buckets."""
        names = [base(arg.value.name) for arg in region.args]
        kept = ["_" if are_draws(arg.value.type) else name for arg, name in zip(region.args, names, strict=True)]
        self.train.lines += [
            f"for {', '.join(names)} in batch.microbatches():",
            f"    part = model({', '.join(names)})  # forward",
            "    (part * share).backward()  # backward",
            "    loss += part.detach()",
        ]
        given = ", ".join("None" if name == "_" else name for name in kept)
        self.evaluate.lines += [
            f"for {', '.join(kept)} in batch.microbatches():",
            f"    loss += model({given})" + ("  # nothing is dropped" if "_" in kept else ""),
        ]
        self.text[region.results[0].name] = "loss"

    def mul(self, op: Op) -> None:
        self._both(f"loss = {self.text[op.inputs[0]]} * share  # mean over the step's labels")
        self.text[op.outputs[0].name] = "loss"
        self.train.lines.append("gradients = state.gradients()")

    def pack(self, op: Op) -> None:
        """The flat parameters of buckets that ranks share out, or the flat gradients."""
        bucket = next(b for b in self._program.buckets if b.dim == op.get("dim"))
        of = "weights" if op.inputs == bucket.params else "gradients"
        if of == "weights" and "weights" not in self.text.values():
            self._both("weights = state.weights()")
            self.text["weights"] = "weights"
        self.text[op.outputs[0].name] = f"{of}[{literal(bucket.name)}]"

    def sum_squares(self, op: Op) -> None:
        self.text[op.outputs[0].name] = f"sum_squares({', '.join(self.text[name] for name in op.inputs)})"

    def grad_norm(self, op: Op) -> None:
        taken = set(self.train.groups)
        names: list[str] = []
        for part in op.inputs:
            names.append(identifier("squares", taken | set(names)))
            self.train.lines.append(f"{names[-1]} = {self.text[part]}")
        total = names[0] if len(names) == 1 else f"({' + '.join(names)})"
        self.train.lines.append(f"norm = {total}.sqrt()")
        self.text[op.outputs[0].name] = "norm"

    def clip_scale(self, op: Op) -> None:
        """All buckets' updates are one call, which scales too."""
        limit = op.get("max")
        scale = f"scale=clip_scale(norm, {literal(limit)}), " if limit else ""
        self.train.lines.append(f"state.update(lr, {scale}skip=count == 0)")

    def held(self, op: Op) -> None:
        """What the state keeps or does: the cast of parameters, their views of a bucket, its update."""
        if op.kind == "cast":
            self.text[op.outputs[0].name] = self.text.get(op.inputs[0], "")

    def _both(self, line: str) -> None:
        self.train.lines.append(line)
        self.evaluate.lines.append(line)


WRITERS: dict[str, Callable[[_Step, Op], None]] = {
    "cast": _Step.held,
    "clip_scale": _Step.clip_scale,
    "coerce": _Step.coerce,
    "count_valid": _Step.count_valid,
    "grad_norm": _Step.grad_norm,
    "mul": _Step.mul,
    "pack": _Step.pack,
    "reciprocal": _Step.reciprocal,
    "sum_squares": _Step.sum_squares,
    "unpack": _Step.held,
    "update": _Step.held,
}
"""How the ops at step scope are written."""
