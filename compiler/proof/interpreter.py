"""Evaluates an IR program for all ranks of its mesh in one process.

Computes the program rank by rank, by an evaluator that shares no code with the passes or the
emitter.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from attrs import field, frozen

from ..ir import Enter, Leave, Op, Program, Region, Stmt, Type
from ..ir.placements import ends
from .semantics import MEANINGS, Call, Semantics
from .semantics.step import loss_scale, unscaled
from .sharded_state import settled, together
from .simulated_mesh import SimulatedMesh
from .tensors import Numbers, Tensor, stacked

Env = dict[str, Tensor]
Where: TypeAlias = tuple[tuple[str, int], ...]
"""The iterations of loops, by their dims, outermost first."""

Watch = Callable[[str, Where, Tensor], None]
Rows = Callable[["Interpreter", Region, Env], Env]
"""Makes the results of the microbatches of a pipeline."""


def nothing(name: str, where: Where, value: Tensor) -> None:
    """Watches nothing."""


METRICS = "loss", "norm", "count", "router loss"
"""The first results of a step, the last one where routers have a loss; then come loads."""


def metrics(program: Program, results: Sequence[Tensor]) -> dict[str, Tensor]:
    """The results of a step by name, as far as they are no parameters."""
    loads = (f"load {i}" for i in range(program.routes))
    return dict(zip((*METRICS[: program.losses + 2], *loads), results, strict=False))


@frozen
class Outcome:
    """Results of a step: by name, losses, norm, count and loads, each gradient and each updated
    parameter.
    """

    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]

    def results(self) -> Iterator[tuple[str, str, Tensor]]:
        """Everything: words for it, the parameter it is of, if any, and the value; parameters
        in order of names.
        """
        yield from ((name, "", value) for name, value in self.metrics.items())
        yield from (
            (f"gradient of {name}", name, self.gradients[name]) for name in sorted(self.gradients)
        )
        yield from (
            (f"updated {name}", name, self.parameters[name]) for name in sorted(self.parameters)
        )


@frozen
class Interpreter:
    """One evaluation.

    `watch` is told every value as it is made; `rows` does the microbatches of a pipeline.
    """

    program: Program
    world: SimulatedMesh
    numbers: Numbers
    watch: Watch = nothing
    meanings: Mapping[str, Semantics] = field(default=MEANINGS)
    rows: Rows | None = None
    _gradients: dict[str, Tensor] = field(factory=dict[str, Tensor], init=False)
    _shapes: dict[Type, tuple[int, ...]] = field(factory=dict[Type, tuple[int, ...]], init=False)

    def run(self, env: Env) -> Outcome:
        """The outcome of the step from what each rank holds of parameters and inputs."""
        region = self.program.region
        inner = self.body(region.body, env, ())
        results = [inner[end.name] for end in region.yields]
        found = metrics(self.program, results)
        made = dict(zip((p.name for p in self.program.stored), results[len(found) :], strict=True))
        params = {p.name: made[p.name] for p in self.program.params}
        return Outcome(found, self._whole(self._gradients), made | self._whole(params))

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the parts put together of what ranks share out."""
        found = dict(tensors)
        for bucket in self.program.buckets:
            each = together(
                self.program,
                self.world,
                bucket,
                [tensors[name] for name in bucket.params],
                self.numbers,
            )
            found |= dict(zip(bucket.params, each, strict=True))
        if self.program.pipeline:
            return {
                name: settled(self.program, self.world, name, value)
                for name, value in found.items()
            }
        return found

    def body(self, body: Sequence[Stmt], outer: Env, where: Where) -> Env:
        """All names visible at the end of a body."""
        env = dict(outer)
        for stmt in body:
            if isinstance(stmt, Op):
                made = self._op(stmt, env)
            elif stmt.kind in ("forward", "backward"):
                env = self.body(stmt.body, env, where)
                continue
            elif stmt.kind == "microbatches" and self.program.pipeline:
                assert self.rows, "verify: a pipeline without what runs its rows"
                made = self.rows(self, stmt, env)
            else:
                made = self._loop(stmt, env, where)
            for name, value in made.items():
                self.watch(name, where, value)
            env |= made
        return env

    def _op(self, op: Op, env: Env) -> Env:
        try:
            results = self._results(op, [env[name] for name in op.inputs])
        except ValueError as error:  # numpy's, of shapes that do not fit
            raise ShapeError(op.outputs[0].name, str(error)) from error
        for value, result in zip(op.outputs, results, strict=True):
            self._check(value.name, value.type, result)
        return {value.name: result for value, result in zip(op.outputs, results, strict=True)}

    def _results(self, op: Op, args: list[Tensor]) -> list[Tensor]:
        if op.kind == "coerce":
            among = [int(rank) for rank in op.names("among")]
            return [self.world.coerced(args[0], op.names("axes"), *ends(op), self.numbers, among)]
        call = Call(self.program, self.world, self.numbers, op, args, self.program.operands(op))
        if op.kind == "update":
            self._gradients.update(
                zip(op.inputs[3:], map(self._unscaled, call.unpacked), strict=True)
            )
        return self.meanings[op.kind].value(call)

    def _unscaled(self, grad: Tensor) -> Tensor:
        """A gradient without the loss scale, if the program has one."""
        if not any(
            op.kind == "loss_scale" for op in self.program.region.body if isinstance(op, Op)
        ):
            return grad
        return unscaled(self.numbers, grad, loss_scale(self.numbers, len(self.world.axes)))

    def _check(self, name: str, type: Type, value: Tensor) -> None:
        if type not in self._shapes:
            self._shapes[type] = self.world.shape(type)
        local = value.array.shape[value.lead :]
        if value.dims != type.dims or local != self._shapes[type]:
            raise ShapeError(name, f"{value.dims} {local} is not {type.dims} {self._shapes[type]}")

    def _loop(self, region: Region, outer: Env, where: Where) -> Env:
        """The results of a repeat or of the microbatches, which run once per index of the
        region's dim.
        """
        count = self.world.dims[region.dim]
        carried = {
            arg.value.name: outer[arg.source] for arg in region.args if arg.enter is Enter.CARRY
        }
        each = [arg for arg in region.args if arg.enter is Enter.EACH]
        ends: list[list[Tensor]] = []
        for i in reversed(range(count)) if region.reverse else range(count):
            slices = {arg.value.name: self.at(outer[arg.source], i) for arg in each}
            inner = self.body(region.body, outer | slices | carried, (*where, (region.dim, i)))
            ends.append([inner[end.name] for end in region.yields])
            lasts = [
                value
                for end, value in zip(region.yields, ends[-1], strict=True)
                if end.leave is Leave.LAST
            ]
            carried = dict(zip(carried, lasts, strict=True))
        columns = zip(*(reversed(ends) if region.reverse else ends), strict=True)
        last = dict(zip((end.name for end in region.yields), ends[-1], strict=True))
        return {
            value.name: last[end.name]
            if end.leave is Leave.LAST
            else self.left(end.leave, region.dim, column)
            for value, end, column in zip(region.results, region.yields, columns, strict=True)
        }

    def at(self, x: Tensor, index: int) -> Tensor:
        """One slice along the first dim."""
        return self.made(("at", index), [x], lambda: x.at(index))

    def left(self, leave: Leave, dim: str, all_: Sequence[Tensor]) -> Tensor:
        """The result of iterations: their sum or their stack."""
        if leave is Leave.SUM:
            return self.made(("total",), all_, lambda: self.numbers.total(all_[0].dims, *all_))
        return self.made(("stacked", dim), all_, lambda: stacked(dim, all_))

    def made(
        self, how: tuple[Hashable, ...], of: Sequence[Tensor], make: Callable[[], Tensor]
    ) -> Tensor:
        """The tensor made of others, in the way that `how` identifies."""
        return make()


class ShapeError(Exception):
    """A value that cannot be made, or has not the shape that its type says."""

    def __init__(self, value: str, why: str) -> None:
        super().__init__(value, why)
        self.value = value


def differing(n: Numbers, found: Tensor, expected: Tensor) -> bool:
    """Whether any element on any rank in any trial differs."""
    x, y = np.broadcast_arrays(found.array, expected.array)
    return bool(n.unequal(x, y).any())
