"""The collectives of a step at a line or over an axis, alike ones together: those of the rank
that sends most there.
"""

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from ...analysis.collective import Collective
from ...analysis.communication import collectives, places
from ...config.units import amount, counted
from ...ir import Program

Ranks = tuple[tuple[Collective, ...], ...]
"""The collectives of each rank of a pipeline, or of all ranks."""


@frozen
class Sent:
    """Collectives of one kind: their results, how many there are in a step, the bytes that a
    rank puts into all.
    """

    op: str
    axes: tuple[str, ...]
    where: str
    values: frozenset[str]
    sizes: frozenset[int]
    count: int
    bytes: int

    def __str__(self) -> str:
        (size, *more), times = sorted(self.sizes), f" × {self.count:,}" if self.count > 1 else ""
        return (
            f"{amount(self.bytes)} in {counted(self.count, 'call')}"
            if more
            else f"{amount(size)}{times}"
        )


def of_ranks(program: Program) -> Ranks:
    """The collectives of a program after the last pass."""
    return tuple(collectives(program, rank) for rank in places(program))


def sent(ranks: Ranks, wanted: Callable[[Collective], bool]) -> list[Sent]:
    """The collectives that are wanted, in the order in which they begin."""
    found = ([each for each in rank if wanted(each)] for rank in ranks)
    return [*_together(max(found, key=_bytes))]


def _together(found: Sequence[Collective]) -> Iterator[Sent]:
    for kind in dict.fromkeys((it.op, it.axes, it.where) for it in found):
        alike = [it for it in found if (it.op, it.axes, it.where) == kind]
        values, sizes = frozenset(it.value for it in alike), frozenset(it.bytes for it in alike)
        yield Sent(*kind, values, sizes, sum(it.count for it in alike), _bytes(alike))


def _bytes(found: Sequence[Collective]) -> int:
    return sum(it.bytes * it.count for it in found)
