"""The positions of a dim that each rank holds, where axes shard it: a part each, or two chunks.

Non-goals: values (`proof.simulated_mesh`), tensors (`runtime.comm.positions`): both follow the same
rule with code of their own.
"""

from collections.abc import Iterator, Sequence

from . import Program, Type

Run = tuple[int, int]
"""Where a run of positions begins, and where it ends."""


def runs_of_ranks(program: Program, type: Type, dim: str) -> Iterator[tuple[Run, ...]]:
    """For each rank of the axes that shard `dim`, the runs of positions that it holds, in its
    order.
    """
    parts = [((0, program.size(dim)),)]
    for axis in type.axes_of(dim):
        ranks, zigzag = program.axis(axis).size, (dim, axis) in program.zigzags
        pieces_by_rank = list[list[int]]()
        for rank in range(ranks):
            pieces_by_rank.append([rank, 2 * ranks - 1 - rank] if zigzag else [rank])
        finer = list[tuple[Run, ...]]()
        for part in parts:
            for pieces in pieces_by_rank:
                finer.append(_pieces_of_runs(part, pieces, len(pieces) * ranks))
        parts = finer
    yield from parts


def _pieces_of_runs(runs: Sequence[Run], pieces: Sequence[int], count: int) -> tuple[Run, ...]:
    """Some of `count` equal pieces of the positions of some runs."""
    length = sum(stop - start for start, stop in runs) // count
    taken: list[Run] = []
    for piece in pieces:
        passed = 0
        for start, stop in runs:
            low = max(start, start + piece * length - passed)
            high = min(stop, start + (piece + 1) * length - passed)
            passed += stop - start
            if low >= high:
                continue
            if taken and taken[-1][1] == low:
                # the run goes on where the last one ended
                low = taken.pop()[0]
            taken.append((low, high))
    return tuple(taken)
