"""Sequences over ranks, experts folded over the same axes, and stages: every pair of ways,
against the reference.
"""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from end_to_end.test_numbers import compare
from end_to_end.test_pipelines import possible
from helpers.oracle import harness
from helpers.oracle.all_pairs import Pair, all_pairs
from helpers.oracle.plans import Case

RANKS = 8
STRATEGIES: dict[str, dict[str, Any]] = {
    "gather": {"cp": 2},
    "ring": {"cp": 2, "how": "via ring"},
    "ulysses": {"uly": 2},
    "ulysses, ring": {"cp": 2, "uly": 2, "how": "via ring"},
}
FOLDINGS: dict[str, dict[str, Any]] = {  # over {} the sequence lies
    "alone": {"experts": "{}"},
    "batch": {"dp": 2, "experts": "dp, {}"},
    "batch only": {"dp": 2, "experts": "dp"},
    "own axis": {"ep": 2, "experts": "ep, {}"},
    "own axis only": {"ep": 2, "experts": "ep"},
    "tensors": {"tp": 2, "sp": True, "experts": "{}, tp"},
    "tensors only": {"tp": 2, "sp": True, "experts": "tp"},
    "whole tokens": {"tp": 2, "experts": "tp"},
    "in parts": {"tp": 2, "experts": "{}", "inner": True},
}
ROUTES = {
    (False, False): "two",
    (False, True): "losses",
    (True, False): "bounded",
    (True, True): "capacity",
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": tuple(STRATEGIES),
    "zigzag": (False, True),
    "folding": tuple(FOLDINGS),
    "schedule": ("none", "1f1b", "interleaved_1f1b(chunks=2)", "zb_h1", "zbv", "dualpipev"),
    "zero": (0, 1, 2, 3),
    "recompute": (
        "none",
        "full",
        "every(2, layers)",
        "selective(dispatch)",
        "selective(attention, silu)",
    ),
    "capacity": (False, True),
    "balance": (False, True),
}
STAGED = [schedule for schedule in FACTORS["schedule"] if schedule != "none"]
IMPOSSIBLE: frozenset[Pair] = frozenset(
    {
        # its ranks all have whole sequences in attention
        frozenset({("strategy", "ulysses"), ("zigzag", True)}),
        *(  # more than eight ranks
            frozenset({("strategy", "ulysses, ring"), ("schedule", schedule)})
            for schedule in STAGED
        ),
        *(  # the sequence of these tests has eight positions, too few for chunks on each
            frozenset({("strategy", "ulysses, ring"), ("folding", folding)})
            for folding in ("tensors", "tensors only")
        ),
    }
)
ROWS = all_pairs(FACTORS, IMPOSSIBLE)


def _case(row: dict[str, Any]) -> Case:
    at, folding = STRATEGIES[row["strategy"]], FOLDINGS[row["folding"]]
    over = ", ".join(axis for axis in ("cp", "uly") if axis in at)
    how = f"{'as zigzag' * row['zigzag']} {at.get('how', '')}".strip()
    data = [axis for axis in ("dp", "ep") if axis in folding]
    case = Case(
        **{**at, **folding, "how": how, "experts": folding["experts"].format(over)},
        model=f"{ROUTES[row['capacity'], row['balance']]}_of_eight",
        state=f"zero {row['zero']} over {', '.join([*data, *over.split(', ')])}"
        if row["zero"]
        else "",
        recompute=row["recompute"],
        kv=4,
        layers=4,
        microbatches=2,
        optimizer="adamw",
        clip=0.05,
    )
    return (
        case
        if row["schedule"] == "none"
        else possible(replace(case, pp=2, schedule=row["schedule"]))
    )


CASES = [*map(_case, ROWS)]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path), steps=2)


def test_every_pair_is_there() -> None:
    """By brute force, on at most eight ranks."""
    assert all(case.ranks <= RANKS for case in CASES)
    for a, b in combinations(FACTORS, 2):
        wanted = {
            frozenset({(a, x), (b, y)}) for x, y in product(FACTORS[a], FACTORS[b])
        } - IMPOSSIBLE
        assert wanted <= {frozenset({(a, row[a]), (b, row[b])}) for row in ROWS}
