"""All-pairs coverage: few cases in which every pair of values of two factors that can occur
together does so.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from itertools import combinations
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def all_pairs(factors: Mapping[str, Sequence[Any]], impossible: Set[Pair]) -> list[Case]:
    """Greedy and deterministic: a case begins with a pair not yet covered, then covers as many more
    as it can.

    `impossible` holds pairs of (factor, value) that no case may have.
    """
    # a dict: a set with an order
    left = {pair: None for pair in _pairs_of(factors) if pair not in impossible}
    cases: list[Case] = []
    while left:
        case = dict(next(iter(left)))
        still = Counter(item for pair in left for item in pair)
        for factor in [factor for factor in factors if factor not in case]:
            case[factor] = _best_value(case, factor, factors[factor], left, still, impossible)
        cases.append({factor: case[factor] for factor in factors})
        left = {pair: None for pair in left if not pair <= case.items()}
    return cases


def _best_value(
    case: Case,
    factor: str,
    values: Sequence[Any],
    left: Collection[Pair],
    still: Counter[tuple[str, Any]],
    impossible: Set[Pair],
) -> Any:
    """The value that covers most pairs now; among equals, the one that is in most pairs `still`
    to cover.
    """

    def gain(value: Any) -> tuple[int, int]:
        now = sum(pair in left for pair in _new_pairs(case, factor, value))
        return now, still[factor, value]

    return max(
        (value for value in values if not _new_pairs(case, factor, value) & impossible), key=gain
    )


def _pairs_of(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    return [
        frozenset({(a, x), (b, y)})
        for a, b in combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    ]


def _new_pairs(case: Case, factor: str, value: Any) -> set[Pair]:
    return {frozenset({item, (factor, value)}) for item in case.items()}
