"""Evaluates an IR program for all ranks of its mesh in one process.

Computes the program rank by rank, by an evaluator that shares no code with the passes or the
emitter.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from attrs import field, frozen

from ..ir import Arg, Enter, Leave, Op, Program, Region, Stmt, Type
from ..ir.placements import ends
from .semantics import MEANINGS, Call, Semantics
from .semantics.step import loss_scale, unscale
from .sharded_state import copy_from_owner, together
from .simulated_mesh import SimulatedMesh
from .tensors import Numbers, Tensor, stack_tensors

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
        """Everything: words for a value, its parameter, if any, and the value; parameters in order
        of names.
        """
        for name, value in self.metrics.items():
            yield name, "", value
        for name in sorted(self.gradients):
            yield f"gradient of {name}", name, self.gradients[name]
        for name in sorted(self.parameters):
            yield f"updated {name}", name, self.parameters[name]


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
        named = metrics(self.program, results)
        names = [param.name for param in self.program.params_and_buffers]
        stored = dict(zip(names, results[len(named) :], strict=True))
        params = {param.name: stored[param.name] for param in self.program.params}
        return Outcome(named, self._whole(self._gradients), stored | self._whole(params))

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of parameters, put together of the parts that ranks share out."""
        whole = dict(tensors)
        for bucket in self.program.buckets:
            shards = [tensors[name] for name in bucket.params]
            joined = together(self.program, self.world, bucket, shards, self.numbers)
            whole |= dict(zip(bucket.params, joined, strict=True))
        if self.program.pipeline:
            for name, value in whole.items():
                whole[name] = copy_from_owner(self.program, self.world, name, value)
        return whole

    def body(self, body: Sequence[Stmt], outer: Env, where: Where) -> Env:
        """All names visible at the end of a body."""
        env = dict(outer)
        for stmt in body:
            if isinstance(stmt, Op):
                results = self._op(stmt, env)
            elif stmt.kind in ("forward", "backward"):
                env = self.body(stmt.body, env, where)
                continue
            elif stmt.kind == "microbatches" and self.program.pipeline:
                assert self.rows, "verify: a pipeline without what runs its rows"
                results = self.rows(self, stmt, env)
            else:
                results = self._loop(stmt, env, where)
            for name, value in results.items():
                self.watch(name, where, value)
            env |= results
        return env

    def _op(self, op: Op, env: Env) -> Env:
        try:
            results = self._results(op, [env[name] for name in op.inputs])
        except ValueError as error:  # numpy's, of shapes that do not fit
            raise ShapeError(op.outputs[0].name, str(error)) from error
        env = dict[str, Tensor]()
        for value, result in zip(op.outputs, results, strict=True):
            self._check(value.name, value.type, result)
            env[value.name] = result
        return env

    def _results(self, op: Op, args: list[Tensor]) -> list[Tensor]:
        if op.kind == "coerce":
            among = [int(rank) for rank in op.names("among")]
            return [self.world.coerce(args[0], op.names("axes"), *ends(op), self.numbers, among)]
        call = Call(self.program, self.world, self.numbers, op, args, self.program.operands(op))
        if op.kind == "update":
            self._gradients.update(
                zip(op.inputs[3:], map(self._unscale, call.update_gradients), strict=True)
            )
        return self.meanings[op.kind].value(call)

    def _unscale(self, grad: Tensor) -> Tensor:
        """A gradient without the loss scale, if the program has one."""
        for op in self.program.region.body:
            if isinstance(op, Op) and op.kind == "loss_scale":
                return unscale(self.numbers, grad, loss_scale(self.numbers, len(self.world.axes)))
        return grad

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
        indices = reversed(range(count)) if region.reverse else range(count)
        carried, sliced = dict[str, Tensor](), list[Arg]()
        for arg in region.args:
            if arg.enter is Enter.CARRY:
                carried[arg.value.name] = outer[arg.source]
            else:
                sliced.append(arg)
        yielded: list[list[Tensor]] = []
        for i in indices:
            slices = {arg.value.name: self.get_slice(outer[arg.source], i) for arg in sliced}
            inner = self.body(region.body, outer | slices | carried, (*where, (region.dim, i)))
            yielded.append([inner[end.name] for end in region.yields])
            lasts = list[Tensor]()
            for end, value in zip(region.yields, yielded[-1], strict=True):
                if end.leave is Leave.LAST:
                    lasts.append(value)
            carried = dict(zip(carried, lasts, strict=True))
        in_order = reversed(yielded) if region.reverse else yielded
        columns = zip(*in_order, strict=True)
        last = dict(zip((end.name for end in region.yields), yielded[-1], strict=True))
        results: Env = {}
        for value, end, column in zip(region.results, region.yields, columns, strict=True):
            if end.leave is Leave.LAST:
                results[value.name] = last[end.name]
            else:
                results[value.name] = self.combine_iterations(end.leave, region.dim, column)
        return results

    def get_slice(self, x: Tensor, index: int) -> Tensor:
        """One slice along the first dim."""
        return self.make_tensor(("at", index), [x], lambda: x.get_slice(index))

    def combine_iterations(self, leave: Leave, dim: str, all_: Sequence[Tensor]) -> Tensor:
        """The result of iterations: their sum or their stack."""
        if leave is Leave.SUM:
            return self.make_tensor(
                ("total",), all_, lambda: self.numbers.total(all_[0].dims, *all_)
            )
        return self.make_tensor(("stacked", dim), all_, lambda: stack_tensors(dim, all_))

    def make_tensor(
        self, how: tuple[Hashable, ...], operands: Sequence[Tensor], make: Callable[[], Tensor]
    ) -> Tensor:
        """The tensor that `make` makes of others, in the way that `how` identifies."""
        return make()


class ShapeError(Exception):
    """A value that cannot be made, or has not the shape that its type says."""

    def __init__(self, value: str, why: str) -> None:
        super().__init__(value, why)
        self.value = value


def differing(n: Numbers, actual: Tensor, expected: Tensor) -> bool:
    """Whether any element on any rank in any trial differs."""
    x, y = np.broadcast_arrays(actual.array, expected.array)
    return bool(n.unequal(x, y).any())
