"""Padded rows of experts: the same numbers as in one process, without a wait of the host; experts
cut over tp too.

Where experts lie and how they train in pairs, as in `test_experts`, of routes with a capacity.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from end_to_end.test_experts import FACTORS, FOLDINGS, IMPOSSIBLE, folded
from end_to_end.test_numbers import compare
from end_to_end.test_pipelines import possible
from helpers.oracle import harness, reference
from helpers.oracle.all_pairs import all_pairs
from helpers.oracle.plans import Case

SPLIT: dict[str, dict[str, Any]] = {
    "within each, sequence parallel": {
        "dp": 2,
        "tp": 2,
        "sp": True,
        "experts": "dp",
        "inner": True,
    },
    "within each of an own axis": {"ep": 2, "tp": 2, "sp": True, "experts": "ep", "inner": True},
    "within each, all on each rank": {"dp": 2, "tp": 2, "sp": True, "inner": True},
    "within each, a long sequence": {
        "cp": 2,
        "how": "as zigzag",
        "tp": 2,
        "sp": True,
        "experts": "cp",
        "inner": True,
    },
}
"""Experts of which ranks have parts, of tokens of which they have parts too."""
MODELS = ("capacity", "roomy")
PAIRS = {**FACTORS, "folding": (*FOLDINGS, *SPLIT), "model": MODELS}
CASES = [
    *dict.fromkeys(
        folded({**FOLDINGS, **SPLIT}, **row, bounded=True) for row in all_pairs(PAIRS, IMPOSSIBLE)
    )
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path))


FEW = (
    Case(
        dp=2,
        tp=2,
        sp=True,
        experts="dp",
        inner=True,
        model="roomy",
        state="zero 1 over dp",
        microbatches=2,
        clip=0.05,
    ),
    Case(
        dp=2,
        tp=2,
        sp=True,
        experts="dp, tp",
        model="roomy",
        recompute="selective(dispatch)",
        kernels="triton",
    ),
    possible(
        Case(
            pp=2,
            ep=2,
            experts="ep",
            model="capacity",
            schedule="zb_h1",
            microbatches=3,
            optimizer="adamw",
        )
    ),
    Case(tp=2, experts="tp", model="capacity", recompute="full"),
    Case(model="roomy", valid="silent_microbatch", microbatches=2),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [replace(case, bounded=True) for case in FEW], ids=str)
def test_two_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path), steps=2)


TO_FIRST = (
    Case(dp=2, tp=2, sp=True, experts="dp", inner=True, model="capacity", recompute="full"),
    Case(dp=2, experts="dp", model="roomy", state="zero 3 over dp", recompute="selective(silu)"),
    Case(tp=2, experts="tp", model="roomy", kernels="triton"),
)


@pytest.mark.long
@pytest.mark.parametrize("case", [replace(case, bounded=True) for case in TO_FIRST], ids=str)
def test_all_tokens_to_the_same_experts(case: Case, tmp_path: Path) -> None:
    """Of equal scores the first experts are chosen: some ranks have no row, others more than their
    capacity.

    One step, after which scores that would be equal differ by rounding.
    """
    start = reference.initial(case.config)
    start |= {
        name: torch.zeros_like(value) for name, value in start.items() if name.endswith("router")
    }
    compare(case, harness.load_case(case, tmp_path), start=start, steps=1)
