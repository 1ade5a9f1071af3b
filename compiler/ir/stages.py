"""Where a model is cut: which statements and which layers of repeats each stage of a pipeline has.

Purpose: one reading of `Pipeline.layers` for all who ask.  A body that is cut alternates groups of ops and repeats:
`group repeat group … repeat group`, where a group may be empty.
Non-goals: how many layers each stage gets (`passes.cut_stages`), and when it works (`schedules`).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from attrs import evolve, frozen

from . import FLOATS, Enter, Op, Pipeline, Program, Region, Stmt, Value


@frozen
class Stage:
    """The groups of ops that a stage has, by number, and its layers of each repeat that is cut."""

    groups: tuple[int, ...]
    layers: tuple[range, ...]

    @property
    def begins(self) -> int:
        """The number of the repeat in which it begins: the first of which it has layers, or the last one."""
        return next((number for number, layers in enumerate(self.layers) if layers), len(self.layers) - 1)


def groups(pipeline: Pipeline, body: Sequence[Stmt]) -> tuple[list[list[Stmt]], list[Region]]:
    """The groups of ops of a body, and the repeats between them."""
    found: list[list[Stmt]] = [[]]
    repeats: list[Region] = []
    for stmt in body:
        if isinstance(stmt, Region) and stmt.dim in pipeline.dims:
            repeats.append(stmt)
            found.append([])
        else:
            found[-1].append(stmt)
    return found, repeats


def stages(program: Program, pipeline: Pipeline) -> list[Stage]:
    """What each stage has, in the model's order."""
    sizes = [program.size(dim) for dim in pipeline.dims]
    starts = [0, *accumulate(sizes)]
    ends = [0, *accumulate(pipeline.layers)]
    last = len(pipeline.layers) - 1
    owners = [0, *(next(k for k in range(last + 1) if ends[k + 1] >= start) for start in starts[1:-1]), last]
    return [
        Stage(
            tuple(group for group, owner in enumerate(owners) if owner == k),
            tuple(
                range(min(max(ends[k] - start, 0), size), min(max(ends[k + 1] - start, 0), size))
                for start, size in zip(starts, sizes, strict=False)
            ),
        )
        for k in range(last + 1)
    ]


def has(pipeline: Pipeline, rank: int) -> tuple[int, ...]:
    """The stages of a rank along the pipeline's axis, in the model's order."""
    return tuple(stage for stage, home in enumerate(pipeline.stage_to_rank) if home == rank)


def share(pipeline: Pipeline, stage: Stage, forward: Region, backward: Region) -> tuple[Region, Region]:
    """The blocks of a microbatch as a stage does them; what its statements read may be what is received."""
    turned = Stage(tuple(len(pipeline.dims) - group for group in stage.groups), stage.layers[::-1])
    blocks = ((forward, stage), (backward, turned))
    ahead, back = (evolve(block, body=tuple(_share(pipeline, own, block.body))) for block, own in blocks)
    return ahead, back


def _share(pipeline: Pipeline, stage: Stage, body: Sequence[Stmt]) -> Iterator[Stmt]:
    bodies, repeats = groups(pipeline, body)
    for number, group in enumerate(bodies):
        yield from (stmt for stmt in group if number in stage.groups or (not number and is_free(stmt)))
        if number < len(repeats) and stage.layers[number]:
            yield repeats[number]


def crossing(program: Program, pipeline: Pipeline) -> list[list[Value]]:
    """What crosses each cut, the one behind the first stage first: what the repeat carries in which it lies."""
    _, repeats = groups(pipeline, program.forward.body)
    carried = [[arg.value for arg in repeat.args if arg.enter is Enter.CARRY] for repeat in repeats]
    return [carried[stage.begins] for stage in stages(program, pipeline)[1:]]


def is_free(stmt: Stmt) -> bool:
    """Whether every stage does a statement by itself: what no gradient comes by is made of a model's inputs alone."""
    return isinstance(stmt, Op) and all(value.type.dtype not in FLOATS for value in stmt.outputs)
