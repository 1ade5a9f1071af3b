"""How a sequence of items is divided into stages: the dearest stage as cheap as can be."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from attrs import frozen


def balanced(costs: Sequence[int], first: int, last: int, count: int) -> tuple[int, ...]:
    """How many of the items, in order, each of `count` stages has: the dearest stage as cheap as can be.

    The first and the last stage cost so much more, and alone may have no item: of items there are `count` - 2 at least.
    Of several such divisions it is the one whose costs have the least sum of squares.
    """
    extra = [0] * count
    extra[0] += first
    extra[-1] += last
    least = tuple(int(0 < stage < count - 1) for stage in range(count))
    assert sum(least) <= len(costs), "balanced: fewer items than stages"
    return _Division(tuple(costs), tuple(extra), least).most_even()


@frozen
class _Division:
    """Items, what each stage costs without any, and how many it must have."""

    costs: tuple[int, ...]
    extra: tuple[int, ...]
    least: tuple[int, ...]

    def most_even(self) -> tuple[int, ...]:
        """How many items each stage has."""
        bound = self._bound()
        ends = [0, *accumulate(self.costs)]
        ways: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # by end: the sum of squares, where its last stage began
        for extra, least in zip(self.extra, self.least, strict=True):
            found: dict[int, tuple[int, int]] = {}
            for start, (squares, _) in ways[-1].items():
                for end in range(start + least, len(ends)):
                    cost = ends[end] - ends[start] + extra
                    if cost > bound:
                        break
                    way = squares + cost * cost, start
                    found[end] = min(way, found.get(end, way))
            ways.append(found)
        return _read_back(ways, len(self.costs))

    def _bound(self) -> int:
        """The least cost that no stage need exceed."""
        low, high = max(0, *self.extra), sum(self.costs) + max(self.extra)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle + 1, high)
        return low

    def _fits(self, bound: int) -> bool:
        """Whether all items find a place if each stage takes as many as it can, and leaves what later stages need.

        No division does better: if a stage takes fewer, later ones have what they would have had, and more.  One
        that must take an item and does not has come to one above the bound, which no other takes either.
        """
        at, needed = 0, sum(self.least)
        for extra, least in zip(self.extra, self.least, strict=True):
            needed -= least
            cost = extra
            while at < len(self.costs) - needed and cost + self.costs[at] <= bound:
                cost += self.costs[at]
                at += 1
        return at == len(self.costs)


def _read_back(ways: Sequence[dict[int, tuple[int, int]]], total: int) -> tuple[int, ...]:
    """The sizes of the stages of the best way to the end."""
    cuts = [total]
    for found in reversed(ways[1:]):
        cuts.append(found[cuts[-1]][1])
    return tuple(end - start for start, end in pairwise(reversed(cuts)))
