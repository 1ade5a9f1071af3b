"""The collectives of a step at a line or over an axis, alike ones together, on the rank that sends
most there.
"""

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from ...compiler.analysis.collective import Collective
from ...compiler.analysis.communication import collectives, places
from ...compiler.config.units import amount, count_words
from ...compiler.ir import Program

Ranks = tuple[tuple[Collective, ...], ...]
"""The collectives of each rank of a pipeline, or of all ranks."""


@frozen
class CollectiveGroup:
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
        size, *other_sizes = sorted(self.sizes)
        if other_sizes:
            return f"{amount(self.bytes)} in {count_words(self.count, 'call')}"
        times = f" × {self.count:,}" if self.count > 1 else ""
        return f"{amount(size)}{times}"


def get_collectives_by_rank(program: Program) -> Ranks:
    """The collectives of a program after the last pass."""
    return tuple(collectives(program, rank) for rank in places(program))


def find_collectives(ranks: Ranks, wanted: Callable[[Collective], bool]) -> list[CollectiveGroup]:
    """The wanted collectives of the rank that sends most in them, in the order of their begins."""
    by_rank = [[*filter(wanted, rank)] for rank in ranks]
    return [*_group_alike(max(by_rank, key=_bytes))]


def _group_alike(collectives: Sequence[Collective]) -> Iterator[CollectiveGroup]:
    by_kind = dict[tuple[str, tuple[str, ...], str], list[Collective]]()
    for collective in collectives:
        kind = (collective.op, collective.axes, collective.where)
        by_kind.setdefault(kind, []).append(collective)
    for kind, alike in by_kind.items():
        values = frozenset(collective.value for collective in alike)
        sizes = frozenset(collective.bytes for collective in alike)
        count = sum(collective.count for collective in alike)
        yield CollectiveGroup(*kind, values, sizes, count, _bytes(alike))


def _bytes(collectives: Sequence[Collective]) -> int:
    return sum(collective.bytes * collective.count for collective in collectives)
