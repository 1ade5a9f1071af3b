"""Where a model is cut: which statements, layers and parameters each stage of a pipeline has.

Purpose: one reading of `Pipeline.layers` for all who ask.  A body that is cut alternates groups of
ops and repeats: `group repeat group … repeat group`, where a group may be empty.  Non-goals: how
many layers each stage gets (`passes.partition_stages`), and when it works (`schedules`).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from attrs import frozen

from . import (
    BATCH,
    FLOATS,
    SEQUENCE,
    Enter,
    Op,
    Param,
    Pipeline,
    Program,
    Region,
    Stmt,
    Value,
    uses,
)


@frozen
class Stage:
    """The groups of ops that a stage has, by number, and its layers of each repeat that is cut."""

    groups: tuple[int, ...]
    layers: tuple[range, ...]

    @property
    def begins(self) -> int:
        """The number of the repeat that it begins in: the first that it has layers of, or the last
        one.
        """
        for number, layers in enumerate(self.layers):
            if layers:
                return number
        return len(self.layers) - 1


def groups(pipeline: Pipeline, body: Sequence[Stmt]) -> tuple[list[list[Stmt]], list[Region]]:
    """The groups of ops of a body, and the repeats between them."""
    bodies: list[list[Stmt]] = [[]]
    repeats: list[Region] = []
    for stmt in body:
        if isinstance(stmt, Region) and stmt.dim in pipeline.dims:
            repeats.append(stmt)
            bodies.append([])
        else:
            bodies[-1].append(stmt)
    return bodies, repeats


def stages(program: Program, pipeline: Pipeline) -> list[Stage]:
    """The parts of each stage, in the model's order."""
    return [*_stages(tuple(map(program.size, pipeline.dims)), pipeline.layers)]


@lru_cache(maxsize=64)
def _stages(sizes: tuple[int, ...], layers: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages that divide repeats of these sizes so that they have these numbers of layers."""
    starts = [0, *accumulate(sizes)]
    ends = [0, *accumulate(layers)]
    last = len(layers) - 1
    owners = [0]
    for start in starts[1:-1]:
        # the stage of the layer before the group
        owners.append(next(k for k in range(last + 1) if ends[k + 1] >= start))
    owners.append(last)
    parts = list[Stage]()
    for k in range(last + 1):
        ranges = list[range]()
        for start, size in zip(starts, sizes, strict=False):
            first = min(max(ends[k] - start, 0), size)
            stop = min(max(ends[k + 1] - start, 0), size)
            ranges.append(range(first, stop))
        owned = tuple(group for group, owner in enumerate(owners) if owner == k)
        parts.append(Stage(owned, tuple(ranges)))
    return tuple(parts)


def layers_of_rank(program: Program, pipeline: Pipeline, rank: int) -> dict[str, list[int]]:
    """The layers that a rank along the pipeline's axis has of each repeat that is cut."""
    stages_of_model = stages(program, pipeline)
    layers: dict[str, list[int]] = {dim: [] for dim in pipeline.dims}
    for stage in pipeline.stages_of(rank):
        for dim, part in zip(pipeline.dims, stages_of_model[stage].layers, strict=True):
            layers[dim] += part
    return layers


def stages_of_param(program: Program, pipeline: Pipeline, param: Param) -> tuple[int, ...]:
    """The stages that have a parameter, or layers of it."""
    whole = dict(pipeline.param_stages)
    if param.name in whole:
        return whole[param.name]
    cut = pipeline.dims.index(param.type.dims[0])
    return tuple(k for k, stage in enumerate(stages(program, pipeline)) if stage.layers[cut])


def readers(
    program: Program, pipeline: Pipeline, body: Sequence[Stmt], params: Mapping[str, str]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The stages that read each parameter whole in forward's `body`; `params` has the parameter
    of each value.
    """
    bodies, repeats = groups(pipeline, body)
    stages_by_param: dict[str, set[int]] = {}
    for k, stage in enumerate(stages(program, pipeline)):
        read = set[str]()
        for group in stage.groups:
            read |= uses(*bodies[group]).keys()
        for repeat, layers in zip(repeats, stage.layers, strict=True):
            if layers:
                slices = {arg.source for arg in repeat.args if arg.enter is Enter.EACH}
                read |= uses(repeat).keys() - slices
        for name in read & params.keys():
            stages_by_param.setdefault(params[name], set()).add(k)
    readers_of_params = list[tuple[str, tuple[int, ...]]]()
    for param in program.params:
        if param.name in stages_by_param:
            readers_of_params.append((param.name, tuple(sorted(stages_by_param[param.name]))))
    return tuple(readers_of_params)


def crossing(program: Program, pipeline: Pipeline) -> list[list[Value]]:
    """The values that cross each cut, which its repeat carries; the cut after the first stage
    comes first.
    """
    _, repeats = groups(pipeline, program.forward.body)
    carried_by_repeat = list[list[Value]]()
    for repeat in repeats:
        carried_by_repeat.append([arg.value for arg in repeat.args if arg.enter is Enter.CARRY])
    return [carried_by_repeat[stage.begins] for stage in stages(program, pipeline)[1:]]


def is_free(stmt: Stmt) -> bool:
    """Whether every stage does a statement by itself: its results belong to tokens, and have no
    gradients.
    """
    return isinstance(stmt, Op) and not any(map(is_made_once, stmt.outputs))


def is_made_once(value: Value) -> bool:
    """Whether one stage makes a value of a body that is cut: it has a gradient, or is a sum over
    layers.

    Such a sum has no batch, or a count for each sequence and expert.
    """
    dims = value.type.dims
    is_by_sequence = len(dims) == 2 and dims[0] == BATCH and dims[1] != SEQUENCE
    return value.type.dtype in FLOATS or BATCH not in dims or is_by_sequence
