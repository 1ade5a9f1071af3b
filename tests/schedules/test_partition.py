"""Items divided into stages: the best of all divisions, found by trying them."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalec.compiler.schedules.partition import balance_stages


def divisions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All of so many items into so many stages, of which the first and the last alone may have
    none.
    """
    for cuts in combinations_with_replacement(range(total + 1), count - 1):
        sizes = tuple(end - start for start, end in pairwise((0, *cuts, total)))
        if all(sizes[1:-1]):
            yield sizes


def stage_costs(costs: list[int], first: int, last: int, sizes: tuple[int, ...]) -> list[int]:
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    found = [sum(costs[start:end]) for start, end in pairwise(ends)]
    found[0] += first
    found[-1] += last
    return found


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 20), st.integers(0, 20), st.data())
def test_no_division_is_better(
    costs: list[int], first: int, last: int, data: st.DataObject
) -> None:
    """The dearest stage is as cheap as can be, and of such divisions the squares' sum is the
    least.
    """
    count = data.draw(st.integers(1, min(5, len(costs) + 2)))
    found = balance_stages(tuple(costs), first, last, count)

    every = list(divisions(len(costs), count))
    assert found in every
    assert worth(costs, first, last, found) == min(
        worth(costs, first, last, sizes) for sizes in every
    )


def worth(costs: list[int], first: int, last: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The dearest stage, then the sum of squares."""
    each = stage_costs(costs, first, last, sizes)
    return max(each), sum(cost * cost for cost in each)


@pytest.mark.parametrize(
    ("costs", "first", "last", "count", "best"),
    [([9, 8, 2, 6, 4, 4, 7], 9, 8, 4, (17, 851)), ([1, 0, 1, 5, 3, 7, 1], 6, 1, 4, (8, 181))],
)
def test_the_dearest_stage_counts_before_all_others(
    costs: list[int], first: int, last: int, count: int, best: tuple[int, int]
) -> None:
    """Others would be more alike, but have a dearer one."""
    assert worth(costs, first, last, balance_stages(tuple(costs), first, last, count)) == best
    every = [worth(costs, first, last, sizes) for sizes in divisions(len(costs), count)]
    assert min(every) == best
    assert min(squares for _, squares in every) < best[1]


@pytest.mark.parametrize(
    ("costs", "first", "last", "count", "found"),
    [
        ([1] * 8, 0, 0, 4, (2, 2, 2, 2)),
        ([1] * 8, 0, 2, 4, (3, 3, 2, 0)),  # the head is worth two layers
        ([1] * 9, 0, 0, 4, (3, 2, 2, 2)),
        ([5, 1, 1, 1, 1, 1], 0, 0, 2, (1, 5)),
        ([3, 3], 9, 9, 4, (0, 1, 1, 0)),
        ([2, 2], 1, 1, 1, (2,)),
        ([10**30, 1, 10**30], 0, 0, 2, (2, 1)),
    ],
)
def test_divisions(
    costs: list[int], first: int, last: int, count: int, found: tuple[int, ...]
) -> None:
    sizes = balance_stages(tuple(costs), first, last, count)
    assert max(stage_costs(costs, first, last, sizes)) == max(
        stage_costs(costs, first, last, found)
    )
    assert sorted(stage_costs(costs, first, last, sizes)) == sorted(
        stage_costs(costs, first, last, found)
    )


def test_many_layers_are_divided_quickly() -> None:
    """1,024 layers of sizes as those of a large model."""
    assert (
        sum(
            balance_stages(
                tuple(4096**4 * (1 + layer % 3) for layer in range(1024)), 0, 4096**5, 64
            )
        )
        == 1024
    )
