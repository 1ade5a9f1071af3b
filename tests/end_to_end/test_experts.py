"""Mixtures of experts against the reference: where experts lie, and tokens that all go to the same
ones.

Every pair of ways to lay experts out and to train them; those of few ranks are also in
`test_crossings`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from end_to_end.test_numbers import LR, compare
from end_to_end.test_pipelines import possible
from helpers.oracle import harness, reference
from helpers.oracle.all_pairs import Pair, all_pairs
from helpers.oracle.plans import Case

RING = "as zigzag via ring"
FOLDINGS: dict[str, dict[str, Any]] = {
    "own axis": {"dp": 2, "ep": 2, "experts": "ep"},
    "dp": {"dp": 4, "experts": "dp"},
    "dp of two": {"replicas": 2, "dp": 2, "experts": "dp"},
    "dp, cp": {"dp": 2, "cp": 2, "how": RING, "experts": "dp, cp"},
    "uly": {"dp": 2, "uly": 2, "experts": "uly"},
    "dp, cp, tp": {"dp": 2, "cp": 2, "how": RING, "tp": 2, "sp": True, "experts": "dp, cp, tp"},
    "whole tokens": {"dp": 2, "tp": 2, "experts": "tp"},
    "within each": {"dp": 2, "tp": 2, "experts": "dp", "inner": True},
}
FACTORS = {
    "folding": tuple(FOLDINGS),
    "schedule": ("none", "1f1b", "interleaved_1f1b(chunks=2)", "zb_h1", "zbv"),
    "state": ("", "zero 1 over {}", "zero 2 over {}", "zero 3 over {}", "bucket = 1KiB"),
    "model": ("two", "one", "sigmoid", "groups", "losses", "capacity", "shared", "biased"),
    "recompute": (
        "none",
        "full",
        "every(2, layers)",
        "selective(dispatch)",
        "selective(silu, dispatch)",
    ),
    "microbatches": (1, 2, 3),
    "gathered": ("save", "regather"),
    "kernels": ("torch", "triton"),
    "optimizer": ("momentum", "adamw", "groups"),
    "valid": ("uneven", "silent_microbatch"),
    "clip": (0.0, 0.05),
}
IMPOSSIBLE: frozenset[Pair] = frozenset(
    {frozenset({("microbatches", 1), ("valid", "silent_microbatch")})}
)
AXES = {"replicas": "replica", "dp": "dp", "ep": "ep", "cp": "cp", "uly": "uly"}


def folded(
    foldings: Mapping[str, dict[str, Any]], folding: str, schedule: str, state: str, **others: Any
) -> Case:
    """A case of one of these foldings, with what it can be combined with."""
    at = foldings[folding]
    state = state.format(", ".join(axis for field, axis in AXES.items() if field in at))
    case = Case(**others, **at, state=state, kv=4, layers=4)
    eight = "eight, bounded" if case.bounded else "eight"
    case = (
        replace(case, model=eight) if case.ranks == 8 else case
    )  # which 12 experts do not divide into
    return case if schedule == "none" else possible(replace(case, pp=2, schedule=schedule))


FIVE = folded(FOLDINGS, "dp, cp, tp", "interleaved_1f1b(chunks=2)", "zero 1 over {}")
# the first stage has none
LATE = Case(pp=2, model="losses", schedule="zb_h1", stages="[0, 2]", microbatches=2)
CASES = [
    *dict.fromkeys(folded(FOLDINGS, **row) for row in all_pairs(FACTORS, IMPOSSIBLE)),
    FIVE,
    LATE,
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path))


FEW = (
    Case(
        dp=2,
        ep=2,
        model="sigmoid",
        experts="ep",
        state="zero 3 over dp, ep",
        microbatches=2,
        optimizer="adamw",
    ),
    Case(
        pp=2,
        ep=2,
        model="two",
        experts="ep",
        schedule="zb_h1",
        microbatches=3,
        recompute="selective(dispatch)",
    ),
    Case(
        dp=2,
        tp=2,
        sp=True,
        model="groups",
        experts="dp, tp",
        recompute="selective(dispatch, silu)",
        clip=0.05,
    ),
    Case(tp=2, model="losses", experts="tp", recompute="full", microbatches=2),
    Case(model="capacity", valid="silent_microbatch", microbatches=2),
    # the last stage has none
    Case(pp=2, dp=2, model="losses", experts="dp", schedule="zbv", layers=3, microbatches=4),
    Case(
        dp=2,
        tp=2,
        model="shared",
        experts="dp",
        inner=True,
        state="zero 2 over dp",
        recompute="full",
    ),
    Case(
        pp=2,
        dp=2,
        model="shared",
        experts="dp",
        schedule="zb_h1",
        microbatches=2,
        recompute="selective(dispatch)",
    ),
)
OF_ALL_LAYERS = (  # a loss over all layers and groups of sequences
    Case(model="all layers", microbatches=2, recompute="full"),
    Case(
        dp=2,
        tp=2,
        sp=True,
        model="all layers",
        experts="dp, tp",
        microbatches=2,
        recompute="selective(dispatch)",
    ),
    Case(
        dp=2,
        cp=2,
        how=RING,
        model="all layers, sigmoid",
        experts="dp, cp",
        state="zero 3 over dp, cp",
    ),
    Case(dp=2, tp=2, model="all layers", experts="dp", inner=True, clip=0.05, optimizer="adamw"),
    Case(pp=2, dp=2, model="all layers", experts="dp", schedule="1f1b", layers=4, microbatches=3),
    Case(
        pp=2,
        model="all layers, sigmoid",
        schedule="zbv",
        layers=4,
        microbatches=2,
        recompute="full",
    ),
    Case(pp=2, model="all layers", schedule="zb_h1", stages="[0, 2]", microbatches=2),
    Case(pp=2, cp=2, how=RING, model="all layers", experts="cp", schedule="zb_h1", microbatches=2),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [*FEW, *OF_ALL_LAYERS], ids=str)
def test_two_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path), steps=2)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.15), ("fp32", 1e-5)])
def test_narrower_precisions_come_near(precision: str, tolerance: float, tmp_path: Path) -> None:
    """Scores are float32, but of rounded activations: in bfloat16 some tokens choose other
    experts.
    """
    case = Case(dp=2, model="two", experts="dp", precision=precision)
    start, batches = reference.initial(case.config), list(harness.batches(case, 3))
    expected = reference.run(case.config, case.training, start, batches, LR)
    steps = harness.run(case, harness.load_case(case, tmp_path), start, batches, LR)
    for got, want in zip(steps, expected, strict=True):
        assert (got.loss, got.norm) == (
            pytest.approx(want.loss, tolerance),
            pytest.approx(want.norm, tolerance),
        )


TO_FIRST = (
    Case(dp=2, model="one", experts="dp", state="zero 2 over dp", recompute="selective(dispatch)"),
    Case(dp=2, tp=2, sp=True, model="two", experts="dp, tp", recompute="full", gathered="regather"),
    Case(tp=2, model="one", experts="tp", recompute="selective(silu)"),
    Case(dp=2, tp=2, model="sigmoid", experts="dp", inner=True, kernels="triton"),
    Case(
        pp=2,
        ep=2,
        model="one",
        experts="ep",
        schedule="zbv",
        layers=4,
        microbatches=2,
        recompute="full",
    ),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", TO_FIRST, ids=str)
def test_ranks_without_a_row(case: Case, tmp_path: Path) -> None:
    """Of equal scores the first experts are chosen, so all tokens go to one rank."""
    start = reference.initial(case.config)
    start |= {
        name: torch.zeros_like(value) for name, value in start.items() if name.endswith("router")
    }
    compare(case, harness.load_case(case, tmp_path), start=start)
