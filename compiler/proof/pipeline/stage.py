"""A stage of a pipeline on its rank: its layers, what it holds, and what it does of a microbatch.

The stage's statements are evaluated as a step of their own, where the repeats that are cut have
only its layers, on ranks that are alone along the stages' axis.  `result` puts together what all
stages add up.  Weights of its chunks are unsharded and their gradients reduced around it (`Moved`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, field, frozen

from ...analysis.param_uses import leaves
from ...analysis.stage_buckets import Chunk, chunks, needed
from ...analysis.stage_program import StageBlock, StageProgram
from ...ir import Enter, Op, Pipeline, Program, Region, Type, Yield, uses
from ...ir.stages import is_free
from ...schedules.actions import Row, Work, spans
from ...schedules.dependencies import Cell
from ..interpreter import Env, Interpreter, Where
from ..sharded_state import noise
from ..simulated_mesh import SimulatedMesh
from ..tensors import RANDOM, Array, Tensor, degree_of
from .split_backward import halves

Sums = dict[tuple[int, str], dict[int, Tensor]]
"""By stage and name, what is made for each microbatch."""


@frozen(slots=False)
class StageRunner:
    """One stage; `machine` and `outer` belong to all ranks."""

    machine: Interpreter
    region: Region
    outer: Env
    own: StageProgram
    rank: int
    worlds: dict[tuple[tuple[str, int], ...], SimulatedMesh]
    """The statements of all stages."""
    _forwards: dict[int, tuple[Env, Env]] = field(
        factory=dict[int, tuple[Env, Env]], init=False, eq=False, repr=False
    )
    """By microbatch, what its forward began with, and all that was known when it was done."""
    _inputs: dict[int, Env] = field(factory=dict[int, Env], init=False, eq=False, repr=False)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline that has this stage."""
        pipeline = self.machine.program.pipeline
        assert pipeline, "verify: no pipeline"
        return pipeline

    @cached_property
    def parts(self) -> Mapping[Work, StageBlock]:
        """The statements of each action."""
        forward, backward = self.own.forward, self.own.backward
        split = halves(backward, self.machine.program.types)
        forward = evolve(forward, body=tuple(stmt for stmt in forward.body if not is_free(stmt)))
        return {
            Work.FORWARD: forward,
            Work.BACKWARD: backward,
            Work.INPUT: split.input,
            Work.WEIGHT: split.weight,
        }

    @cached_property
    def _alone(self) -> Interpreter:
        """All layers, on one rank of the stages' axis."""
        return evolve(self.machine, world=self._world({}))

    @cached_property
    def _own(self) -> Interpreter:
        """The stage's layers; watchers hear of a layer by its place among all."""
        watch_all, layers = self.machine.watch, self.own.layers

        def watch(name: str, where: Where, value: Tensor) -> None:
            if layers.keys() & {*value.dims}:
                return
            places = tuple((dim, layers[dim][i] if dim in layers else i) for dim, i in where)
            watch_all(name, places, value)

        sizes = {dim: len(indices) for dim, indices in layers.items()}
        return evolve(self.machine, world=self._world(sizes), watch=watch)

    def _world(self, sizes: dict[str, int]) -> SimulatedMesh:
        """One rank of the stages' axis, and dims of other sizes; stages of the same sizes share
        what is known of it.
        """
        key, whole = tuple(sizes.items()), self.machine.world
        if key not in self.worlds:
            axes = whole.axes | {self.pipeline.axis: 1}
            self.worlds[key] = SimulatedMesh(axes, whole.dims | sizes, whole.zigzags)
        return self.worlds[key]

    @cached_property
    def _held(self) -> Env:
        """The rank's values of all that the microbatches read."""
        env: Env = {}
        for name in uses(self.region):
            if name in self.outer:
                env[name] = self._here(self.outer[name])
        return env

    def _here(self, x: Tensor) -> Tensor:
        axis = 1 + list(self.machine.world.axes).index(self.pipeline.axis)
        if x.array.shape[axis] == 1:
            return x
        index = (*(slice(None),) * axis, slice(self.rank, self.rank + 1))
        return self.machine.make_tensor(
            ("of rank", self.rank), [x], lambda: Tensor(x.dims, x.array[index], x.degree)
        )

    def inputs(self, microbatch: int) -> Env:
        """The inputs of a microbatch."""
        if microbatch not in self._inputs:
            env = dict(self._held)
            for arg in self.region.args:
                if arg.enter is Enter.EACH:
                    env[arg.value.name] = self.machine.get_slice(self._held[arg.source], microbatch)
            free = [*filter(is_free, self.own.forward.body)]  # every stage does these for itself
            env = self._alone.body(free, env, ((self.region.dim, microbatch),))
            self._inputs[microbatch] = {name: self._layers(value) for name, value in env.items()}
        return self._inputs[microbatch]

    def _layers(self, x: Tensor) -> Tensor:
        """The stage's slices of the inputs of split repeats."""
        layers = self.own.layers.get(x.dims[0]) if x.dims else None
        if layers is None:
            return x
        index = (*(slice(None),) * x.lead, slice(layers.start, layers.stop))
        how = ("layers", layers.start, layers.stop)
        return self.machine.make_tensor(how, [x], lambda: Tensor(x.dims, x.array[index], x.degree))

    def run(self, part: StageBlock, env: Env, entering: Iterable[Tensor], microbatch: int) -> Env:
        """All that is known when a part is done.

        A forward that begins with what it began with is not done twice.
        """
        handed = [*entering]
        expected = [value.name for value in part.inputs]
        assert len(handed) == len(expected), (
            f"verify: a stage begins with {len(expected)} values, {len(handed)} come"
        )
        begin = env | dict(zip(expected, handed, strict=True))
        if part is not self.parts[Work.FORWARD]:
            return self._own.body(part.body, begin, ((self.region.dim, microbatch),))
        before, end = self._forwards.get(microbatch, ({}, {}))
        if before.keys() != begin.keys() or any(before[name] is not x for name, x in begin.items()):
            end = self._own.body(part.body, begin, ((self.region.dim, microbatch),))
            self._forwards[microbatch] = begin, end
        return end

    def sums(self, work: Work, env: Env) -> Env:
        """The results of the microbatches after one action."""
        names = self._makes(work)
        return {end.name: env[end.name] for end in self.region.yields if end.name in names}

    def place(self, type: Type) -> tuple[slice, ...]:
        """Where its part of a value of all ranks is."""
        index = [slice(None)]
        for axis in self.machine.world.axes:
            is_stages = axis == self.pipeline.axis
            index.append(slice(self.rank, self.rank + 1) if is_stages else slice(None))
        for dim in type.dims:
            layers = self.own.layers.get(dim)
            if layers is None:
                index.append(slice(None))
            else:
                index.append(slice(layers.start, layers.stop))
        return tuple(index)

    @cached_property
    def makes(self) -> set[str]:
        """The results that its microbatches contribute to."""
        return self._makes(Work.FORWARD) | self._makes(Work.BACKWARD)

    def _makes(self, work: Work) -> set[str]:
        """The results that an action makes; losses and loads are the last stage's, also if they are
        handed to it.
        """
        part, lasts = self.parts[work], {end.name for end in self.lasts}
        names = {*part.bound_names} - lasts
        if work is Work.FORWARD and not part.outputs:
            names |= lasts
        return names

    @property
    def lasts(self) -> tuple[Yield, ...]:
        """The results that only the last stage makes: losses and loads."""
        return self.region.yields[: self.machine.program.microbatch_results]


def result(stages: Sequence[StageRunner], sums: Sums, end: Yield, type: Type) -> Tensor:
    """A result of the microbatches on each rank; where a rank has no part, 0 for losses and
    loads, else noise.
    """
    machine, dim = stages[0].machine, stages[0].region.dim
    is_last = end in stages[-1].lasts
    makers = [k for k, stage in enumerate(stages) if end.name in stage.makes]
    parts = dict[int, Tensor]()
    for k in makers:
        if (k, end.name) in sums:
            parts[k] = machine.combine_iterations(end.leave, dim, [*sums[k, end.name].values()])

    def put_together() -> Tensor:
        array = _nothing(machine, end.name, type, is_last)
        for k in makers:
            array[stages[k].place(type)] = 0
        for k, part in parts.items():
            place = stages[k].place(type)
            before = Tensor(type.dims, array[place])
            array[place] = machine.numbers.total(type.dims, before, part).array
        return Tensor(type.dims, array, degree_of([*parts.values()]) | RANDOM)

    return machine.make_tensor(("of all ranks", end.name, *parts), [*parts.values()], put_together)


def _nothing(machine: Interpreter, name: str, type: Type, is_last: bool) -> Array:
    """Outputs of ranks that compute nothing, to be written to."""
    world, n = machine.world, machine.numbers
    shape = world.shape(type)
    zero = n.constant(np.zeros((*(1,) * (1 + len(world.axes)), *shape), int), type.dims)
    noisy = zero.array if is_last else noise(zero, name, n)
    trials = len(n.random((), name))
    return np.broadcast_to(noisy, (trials, *world.lead, *shape)).copy()


@frozen
class Move:
    """Cells of a chunk of a rank: before them its weights are awaited, its reduction begun, its
    weights freed.

    None where that does not happen.
    """

    rank: int
    chunk: Chunk
    awaited: int | None
    begun: int | None
    freed: int | None

    def has_weights(self, cell: int) -> bool:
        """Whether its weights are there in a cell."""
        if self.awaited is not None and cell < self.awaited:
            return False
        return self.freed is None or cell < self.freed

    def is_reduced(self, cell: int) -> bool:
        """Whether in a cell its reduction is in flight, or done: later additions are lost."""
        return self.begun is not None and self.begun <= cell


def moves(program: Program, rows: Sequence[Row]) -> tuple[Move, ...]:
    """Communication of all ranks, as it follows from their rows."""
    rank_moves: list[Move] = []
    for rank, stage_spans in enumerate(map(spans, rows)):
        for chunk in chunks(program)[rank]:
            bucket, span = program.bucket(chunk.bucket), needed(stage_spans, chunk.stages)
            is_reduced = bucket.shard_axes or bucket.reduce_axes
            rank_moves.append(
                Move(
                    rank,
                    chunk,
                    awaited=span.start if bucket.shard_axes else None,
                    begun=span.stop if is_reduced else None,
                    freed=span.stop if bucket.reshard_after_forward else None,
                )
            )
    return tuple(rank_moves)


@frozen
class Names:
    """Names of weights and gradients in the microbatches: the parameter of each value that they
    read or add up.
    """

    weights: Mapping[str, str]
    gradients: Mapping[str, str]


def names(program: Program, region: Region) -> Names:
    """The names in the microbatches `region` of a step."""
    params = dict[str, str]()
    for op in program.region.body:
        if isinstance(op, Op) and op.kind == "pack":
            bucket = program.bucket(str(op.get("bucket")))
            params |= dict(zip(op.inputs, bucket.params, strict=False))
    gradients = dict[str, str]()
    for end, result in zip(region.yields, region.results, strict=True):
        if result.name in params:
            gradients[end.name] = params[result.name]
    return Names(leaves(program), gradients)


class Moved:
    """Present weights and lost gradients, cell by cell."""

    def __init__(self, moves: Sequence[Move], names: Names) -> None:
        self._moves, self._names = moves, names

    def missing_weights(self, cell: Cell, stage: int) -> set[str]:
        """The weights of a stage that are not there."""
        params = self._params(cell, stage, lambda move: not move.has_weights(cell.place))
        return {name for name, param in self._names.weights.items() if param in params}

    def lost_gradients(self, cell: Cell, stage: int) -> set[str]:
        """The gradients that a stage adds to in vain."""
        params = self._params(cell, stage, lambda move: move.is_reduced(cell.place))
        return {name for name, param in self._names.gradients.items() if param in params}

    def _params(self, cell: Cell, stage: int, holds: Callable[[Move], bool]) -> set[str]:
        params = set[str]()
        for move in self._moves:
            if move.rank == cell.rank and stage in move.chunk.stages and holds(move):
                params.update(move.chunk.params)
        return params
