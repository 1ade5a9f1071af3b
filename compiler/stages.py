"""Where a model is cut: which statements and which turns of repeats each stage of a pipeline has.

Purpose: one reading of `Pipeline.turns` for all who ask.  A body that is cut is groups of ops and repeats that are cut,
in turn: `group repeat group … repeat group`, where a group may be empty.
Non-goals: how many turns each stage gets (`passes.cut_stages`), and when it works (`schedules`).
"""

from collections.abc import Sequence
from itertools import accumulate

from attrs import frozen

from .ir import FLOATS, Op, Pipeline, Program, Region, Stmt


@frozen
class Stage:
    """The groups of ops that a stage has, by number, and its turns of each repeat that is cut."""

    groups: tuple[int, ...]
    turns: tuple[range, ...]


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
    ends = [0, *accumulate(pipeline.turns)]
    last = len(pipeline.turns) - 1
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


def is_free(stmt: Stmt) -> bool:
    """Whether every stage does a statement by itself: what no gradient comes by is made of a model's inputs alone."""
    return isinstance(stmt, Op) and all(value.type.dtype not in FLOATS for value in stmt.outputs)
