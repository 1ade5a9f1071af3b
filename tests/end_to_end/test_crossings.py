"""Every pair of ways to cut a model over ranks and to train it, in few programs: each step against the reference.

Values that are alike are one level of a factor, and take turns where it occurs.
Non-goals: more than four ranks, every value with every other (`test_numbers`, `test_pipelines`, which are long).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from end_to_end.test_numbers import compare
from end_to_end.test_pipelines import SCHEDULES, possible
from helpers.oracle import harness, matrix
from helpers.oracle.all_pairs import Pair, all_pairs
from helpers.oracle.plans import Case

PROGRAMS, RANKS = 25, 4
"""At most so many, on at most so many ranks."""

STAGED = {
    "a stage a rank": ("gpipe", "1f1b", "zb_h1", "zb_h2"),
    "several in order": ("interleaved_1f1b(chunks=2)", "breadth_first(chunks=2)", "interleaved_zero_bubble(chunks=2)"),
    "down and up": ("zbv", "dualpipev"),
}
SHARED = {
    "whole": ("", "bucket = 1KiB"),
    "gradients": ("zero 1 over dp", "zero 2 over dp", "zero 1 over dp  bucket = 1KiB"),
    "parameters": [state for state in matrix.FACTORS["state"] if "zero 3" in state or "parameters" in state],
}
MESHES = {"dp": ({"dp": 3}, {"dp": 2}), "tp": ({"tp": 4}, {"tp": 2}), "both": ({"dp": 2, "tp": 2},)}
STAGES = ("[0, 2]", "[2, 0]", "")
"""Layers of the first stage and of the last, where there are two."""
REPLICAS = Case(replicas=2, dp=2, optimizer="adamw", clip=0.05, state="zero 3 over replica, dp", recompute="full")
FACTORS: Mapping[str, Sequence[Any]] = {
    "schedule": ("none", *STAGED),
    "mesh": tuple(MESHES),
    "state": tuple(SHARED),
    "optimizer": matrix.FACTORS["optimizer"],
    "recompute": matrix.FACTORS["recompute"],
    "model": ("llama", "tied", "parallel", "every"),
    "valid": ("uneven", "silent_rank", "silent_microbatch"),
    "kv": (4, 2, 1),
    "microbatches": (1, 2, 3),
    "clip": (0.0, 0.05, 1e3),
    "layers": (4, 2),
    "sp": (False, True),
    "vocab": (True, False),
    "gathered": ("save", "regather"),
    "kernels": ("torch", "triton"),
    "logits": ("chunk", "save"),
    "padded": (False, True),
}


def _pairs(a: str, values: Sequence[Any], b: str, others: Sequence[Any]) -> set[Pair]:
    return {frozenset({(a, x), (b, y)}) for x, y in product(values, others)}


IMPOSSIBLE: frozenset[Pair] = frozenset(
    _pairs("schedule", tuple(STAGED), "mesh", ["both"])  # more than four ranks
    | _pairs("schedule", ("several in order", "down and up"), "layers", [2])
    | _pairs("mesh", ["tp"], "state", ("gradients", "parameters"))
    | _pairs("mesh", ["tp"], "valid", ["silent_rank"])
    | _pairs("mesh", ["dp"], "sp", [True])
    | _pairs("mesh", ["dp"], "vocab", [False])
    | _pairs("microbatches", [1], "valid", ["silent_microbatch"])
    | _pairs("model", ["every"], "optimizer", ["groups"])  # which the reference has not
)
ROWS = all_pairs(FACTORS, IMPOSSIBLE)


def _cases() -> Iterator[Case]:
    layers = defaultdict[Any, int](int)

    def next_of(alike: Sequence[Any]) -> Any:
        layers[str(alike)] += 1
        return alike[(layers[str(alike)] - 1) % len(alike)]

    for row in ROWS:
        case = {**row, "state": next_of(SHARED[row["state"]])}
        schedule, mesh = case.pop("schedule"), case.pop("mesh")
        if schedule == "none":
            yield Case(**case, **next_of(MESHES[mesh]))
        else:
            stages = next_of(STAGES) if row["layers"] == 2 else ""
            case[mesh] = 2
            yield possible(Case(**case, pp=2, schedule=next_of(STAGED[schedule]), stages=stages))


CASES = [*_cases(), REPLICAS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.compiled(case, tmp_path), steps=2)


def test_few_programs_have_every_pair() -> None:
    """By brute force, for the generator is part of the proof; and every value of those that are alike occurs."""
    assert len(CASES) <= PROGRAMS
    assert all(1 < case.ranks <= RANKS for case in CASES)
    for a, b in combinations(FACTORS, 2):
        assert _pairs(a, FACTORS[a], b, FACTORS[b]) - IMPOSSIBLE <= {frozenset({(a, r[a]), (b, r[b])}) for r in ROWS}
    assert {case.schedule for case in CASES if case.pp > 1} == {*SCHEDULES}
    assert {case.state for case in CASES} >= {state for alike in SHARED.values() for state in alike}
    assert {(case.dp, case.tp) for case in CASES if case.pp == 1} == {(2, 1), (3, 1), (1, 2), (1, 4), (2, 2)}
    assert {case.stages for case in CASES} == {*STAGES}
