"""How a sequence of items is divided into stages: the dearest stage as cheap as can be."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from attrs import frozen

Ways = dict[int, tuple[int, int]]
"""By the end of the stages so far: the least sum of squares, and the beginning of the last of these
stages then.
"""


@lru_cache(maxsize=4)
def balance_stages(costs: tuple[int, ...], first: int, last: int, count: int) -> tuple[int, ...]:
    """How many of the items, in order, each of `count` stages has: the dearest stage as cheap as
    can be.

    The first stage costs `first` more and the last costs `last` more.  These two alone may have no
    item: there are at least `count` - 2 items.  Among several such divisions it is the one whose
    costs have the least sum of squares.
    """
    extra = [0] * count
    extra[0] += first
    extra[-1] += last
    least = tuple(int(0 < stage < count - 1) for stage in range(count))
    assert sum(least) <= len(costs), "balanced: fewer items than stages"
    return _Division(costs, tuple(extra), least).most_even()


@frozen
class _Division:
    """The costs of items, the cost of each stage without any, and how many items it must have."""

    costs: tuple[int, ...]
    extra: tuple[int, ...]
    least: tuple[int, ...]

    def most_even(self) -> tuple[int, ...]:
        """How many items each stage has."""
        bound, total = self._bound(), len(self.costs)
        ends = [0, *accumulate(self.costs)]
        ways: list[Ways] = [{0: (0, 0)}]
        backwards = _Division(self.costs[::-1], self.extra[::-1], self.least[::-1])
        earliest = [total - left for left in (0, *backwards.find_ends(bound))][-2::-1]
        for extra, least, *where in zip(
            self.extra, self.least, earliest, self.find_ends(bound), strict=True
        ):
            ways.append(_after(ways[-1], ends, bound, extra, least, where))
        cuts = [total]  # read back from the end
        for ways_of_stage in reversed(ways[1:]):
            _, begin = ways_of_stage[cuts[-1]]
            cuts.append(begin)
        return tuple(end - start for start, end in pairwise(reversed(cuts)))

    def _bound(self) -> int:
        """The least cost that no stage need exceed."""
        low, high = max(0, *self.extra), sum(self.costs) + max(self.extra)
        while low < high:
            middle = (low + high) // 2
            if self.find_ends(middle)[-1] == len(self.costs):
                high = middle
            else:
                low = middle + 1
        return low

    def find_ends(self, bound: int) -> list[int]:
        """The end of each stage if each takes as many items as it can, and leaves the items that
        later stages must have.

        No division does better: if a stage takes fewer, later stages have the items that they would
        have had, and more.  A stage that must take an item and does not has come to an item above
        the bound, and no other stage takes this item either.
        """
        item, needed, ends = 0, sum(self.least), list[int]()
        for extra, least in zip(self.extra, self.least, strict=True):
            needed -= least
            cost = extra
            while item < len(self.costs) - needed and cost + self.costs[item] <= bound:
                cost += self.costs[item]
                item += 1
            ends.append(item)
        return ends


def _after(
    before: Ways, ends: Sequence[int], bound: int, extra: int, least: int, where: Sequence[int]
) -> Ways:
    """The best ways after one more stage, which ends somewhere from the first to the last of
    `where`.

    Squares are convex: a best way that ends later begins no earlier.
    """
    best: Ways = {}
    # ends from `low` on, below `high`, whose stage begins from `first` to `last`
    open = [(where[0], where[1] + 1, min(before), max(before))]
    while open:
        low, high, first, last = open.pop()
        end = (low + high) // 2
        # earlier starts cost more than the bound
        earliest = max(first, bisect_left(ends, ends[end] + extra - bound))
        ways: list[tuple[int, int]] = []
        for start in range(earliest, min(last, end - least) + 1):
            if start in before:
                ways.append((before[start][0] + (ends[end] - ends[start] + extra) ** 2, start))
        highest, lowest = last, first
        if ways:
            best[end] = min(ways)
            highest = lowest = best[end][1]
        if low < end:
            open.append((low, end, first, highest))
        if end + 1 < high:
            open.append((end + 1, high, lowest, last))
    return best
