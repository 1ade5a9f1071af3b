"""The positions of a dim that each rank holds, where axes shard it: a part each, or two chunks.

Non-goals: values (`proof.simulated_mesh`), tensors (`runtime.comm.positions`), whose makers of this
rule are their own.
"""

from collections.abc import Iterator, Sequence

from . import Program, Type

Run = tuple[int, int]
"""Where a run of positions begins, and where it ends."""


def held(program: Program, type: Type, dim: str) -> Iterator[tuple[Run, ...]]:
    """For each rank of the axes that shard `dim`, the runs of positions that it holds, in its
    order.
    """
    parts = [((0, program.size(dim)),)]
    for axis in type.axes_of(dim):
        ranks, zigzag = program.axis(axis).size, (dim, axis) in program.zigzags
        pieces = [[rank, 2 * ranks - 1 - rank] if zigzag else [rank] for rank in range(ranks)]
        parts = [_taken(part, own, len(own) * ranks) for part in parts for own in pieces]
    yield from parts


def _taken(runs: Sequence[Run], pieces: Sequence[int], count: int) -> tuple[Run, ...]:
    """Some of `count` equal pieces of the positions of some runs."""
    each = sum(stop - start for start, stop in runs) // count
    found: list[Run] = []
    for piece in pieces:
        passed = 0
        for start, stop in runs:
            low, high = (
                max(start, start + piece * each - passed),
                min(stop, start + (piece + 1) * each - passed),
            )
            if low < high and found and found[-1][1] == low:
                low = found.pop()[0]
            found += [(low, high)] if low < high else []
            passed += stop - start
    return tuple(found)
