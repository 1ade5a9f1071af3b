"""How a sequence of items is divided into stages: the dearest stage as cheap as can be."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from attrs import frozen

Ways = dict[int, tuple[int, int]]
"""By where the stages so far end: the least sum of squares, and where the last of them then
begins.
"""


@lru_cache(maxsize=4)
def balanced(costs: tuple[int, ...], first: int, last: int, count: int) -> tuple[int, ...]:
    """How many of the items, in order, each of `count` stages has: the dearest stage as cheap as
    can be.

    The first and the last stage cost so much more, and alone may have no item: of items there are
    `count` - 2 at least.  Among several such divisions it is the one whose costs have the least sum
    of squares.
    """
    extra = [0] * count
    extra[0] += first
    extra[-1] += last
    least = tuple(int(0 < stage < count - 1) for stage in range(count))
    assert sum(least) <= len(costs), "balanced: fewer items than stages"
    return _Division(costs, tuple(extra), least).most_even()


@frozen
class _Division:
    """Items, what each stage costs without any, and how many it must have."""

    costs: tuple[int, ...]
    extra: tuple[int, ...]
    least: tuple[int, ...]

    def most_even(self) -> tuple[int, ...]:
        """How many items each stage has."""
        bound, total = self._bound(), len(self.costs)
        ends = [0, *accumulate(self.costs)]
        ways: list[Ways] = [{0: (0, 0)}]
        backwards = _Division(self.costs[::-1], self.extra[::-1], self.least[::-1])
        earliest = [total - left for left in (0, *backwards.reached(bound))][-2::-1]
        for extra, least, *where in zip(
            self.extra, self.least, earliest, self.reached(bound), strict=True
        ):
            ways.append(_after(ways[-1], ends, bound, extra, least, where))
        cuts = [total]  # read back from the end
        for found in reversed(ways[1:]):
            cuts.append(found[cuts[-1]][1])
        return tuple(end - start for start, end in pairwise(reversed(cuts)))

    def _bound(self) -> int:
        """The least cost that no stage need exceed."""
        low, high = max(0, *self.extra), sum(self.costs) + max(self.extra)
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if self.reached(middle)[-1] == len(self.costs) else (middle + 1, high)
            )
        return low

    def reached(self, bound: int) -> list[int]:
        """Where each stage ends if each takes as many items as it can, and leaves what later stages
        need.

        No division does better: if a stage takes fewer, later ones have what they would have had,
        and more.  One that must take an item and does not has come to one above the bound, which no
        other takes either.
        """
        at, needed, found = 0, sum(self.least), list[int]()
        for extra, least in zip(self.extra, self.least, strict=True):
            needed -= least
            cost = extra
            while at < len(self.costs) - needed and cost + self.costs[at] <= bound:
                cost += self.costs[at]
                at += 1
            found.append(at)
        return found


def _after(
    before: Ways, ends: Sequence[int], bound: int, extra: int, least: int, where: Sequence[int]
) -> Ways:
    """The best ways after one more stage, which ends somewhere from the first to the last of
    `where`.

    Squares are convex: of these, one that ends later begins no earlier.
    """
    found: Ways = {}
    open = [(where[0], where[1] + 1, min(before), max(before))]
    while open:
        low, high, first, last = open.pop()
        end = (low + high) // 2
        starts = range(
            max(first, bisect_left(ends, ends[end] + extra - bound)), min(last, end - least) + 1
        )
        ways = [
            (before[at][0] + (ends[end] - ends[at] + extra) ** 2, at)
            for at in starts
            if at in before
        ]
        if ways:
            found[end] = min(ways)
        highest, lowest = (found[end][1],) * 2 if ways else (last, first)
        open += [
            part
            for part in ((low, end, first, highest), (end + 1, high, lowest, last))
            if part[0] < part[1]
        ]
    return found
