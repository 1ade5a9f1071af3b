"""Every pair of ways to cut a model over ranks and to train it, in few programs: each step against
the reference.

Values that are alike are one level of a factor, and take turns where it occurs.  Non-goals: more
than four ranks, every value with every other (`test_numbers`, `test_pipelines`, which are long).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from end_to_end.test_numbers import compare
from end_to_end.test_pipelines import SCHEDULES, possible
from helpers.oracle import harness, matrix
from helpers.oracle.all_pairs import Pair, all_pairs
from helpers.oracle.plans import Case

PROGRAMS, RANKS = 40, 4
"""At most so many, on at most so many ranks."""

STAGED = {
    "a stage a rank": ("gpipe", "1f1b", "zb_h1", "zb_h2"),
    "several in order": (
        "interleaved_1f1b(chunks=2)",
        "breadth_first(chunks=2)",
        "interleaved_zero_bubble(chunks=2)",
    ),
    "down and up": ("zbv", "dualpipev"),
}
SHARED = {
    "whole": ("", "bucket = 1KiB"),
    "gradients": ("zero 1 over dp", "zero 2 over dp", "zero 1 over dp  bucket = 1KiB"),
    "parameters": [
        state for state in matrix.FACTORS["state"] if "zero 3" in state or "parameters" in state
    ],
}
CONTEXTS = (
    {"cp": 2, "how": "as zigzag"},
    {"cp": 2, "how": "as zigzag via ring"},
    {"uly": 2},
    {"cp": 2, "how": "via ring"},
    {"cp": 2},
)
"""A sequence over an axis of its own, by each strategy and layout."""
MESHES: Mapping[str, Sequence[dict[str, Any]]] = {
    "dp": ({"dp": 3}, {"dp": 2}),
    "tp": ({"tp": 4}, {"tp": 2}),
    "both": ({"dp": 2, "tp": 2},),
    "cp": CONTEXTS,
    "cp and tp": CONTEXTS,
}
STAGES = ("[0, 2]", "[2, 0]", "")
"""Layers of the first stage and of the last, where there are two."""
EXPERTS = ("losses", "capacity", "two", "one", "sigmoid", "groups")
REPLICAS = Case(
    replicas=2,
    dp=2,
    optimizer="adamw",
    clip=0.05,
    state="zero 3 over replica, dp",
    recompute="full",
)
FACTORS: Mapping[str, Sequence[Any]] = {
    "schedule": ("none", *STAGED),
    "mesh": tuple(MESHES),
    "state": tuple(SHARED),
    "optimizer": matrix.FACTORS["optimizer"],
    "recompute": matrix.FACTORS["recompute"],
    "model": ("llama", "tied", "parallel", "every", "experts", "latent"),
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
    _pairs("schedule", tuple(STAGED), "mesh", ["both", "cp and tp"])  # more than four ranks
    | _pairs("schedule", ("several in order", "down and up"), "layers", [2])
    | _pairs("mesh", ["tp"], "state", ("gradients", "parameters"))
    | _pairs("mesh", ["tp", "cp", "cp and tp"], "valid", ["silent_rank"])
    | _pairs("mesh", ["dp", "cp"], "sp", [True])
    | _pairs("mesh", ["dp", "cp"], "vocab", [False])
    | _pairs("microbatches", [1], "valid", ["silent_microbatch"])
    | _pairs("model", ["every", "latent"], "optimizer", ["groups"])  # which the reference has not
)
ROWS = all_pairs(FACTORS, IMPOSSIBLE)


def _cases() -> Iterator[Case]:
    layers = defaultdict[Any, int](int)

    def next_of(alike: Sequence[Any]) -> Any:
        layers[str(alike)] += 1
        return alike[(layers[str(alike)] - 1) % len(alike)]

    for row in ROWS:
        case = {**row, "state": next_of(SHARED[row["state"]])}
        if row["model"] == "experts":
            case["model"] = next_of(EXPERTS)
        schedule, mesh = case.pop("schedule"), case.pop("mesh")
        if schedule == "none":
            axes: dict[str, Any] = next_of(MESHES[mesh]) | (
                {"tp": 2} if mesh == "cp and tp" else {}
            )
            yield _folded(_shared(Case(**case, **axes)))
        else:
            stages = next_of(STAGES) if row["layers"] == 2 else ""
            own: dict[str, Any] = next_of(CONTEXTS) if mesh == "cp" else {mesh: 2}
            yield _folded(
                possible(
                    _shared(
                        Case(**case, **own, pp=2, schedule=next_of(STAGED[schedule]), stages=stages)
                    )
                )
            )


def _shared(case: Case) -> Case:
    """The case with its state over all of its data axes."""
    axes = [axis for axis in ("dp", "cp", "uly") if axis == "dp" or getattr(case, axis) > 1]
    return replace(case, state=case.state.replace("over dp", f"over {', '.join(axes)}"))


def _folded(case: Case) -> Case:
    """The case with its experts over all axes that shard tokens; over tp where it has no
    others, else within each.
    """
    if not case.config.route:
        return case
    tokens = [axis for axis in ("dp", "cp", "uly") if getattr(case, axis) > 1] + ["tp"] * case.sp
    return replace(
        case, experts=", ".join(tokens) or "tp", inner=bool(tokens) and case.tp > 1 and not case.sp
    )


BOTH = (
    Case(
        cp=2,
        uly=2,
        how="as zigzag via ring",
        kv=2,
        recompute="full",
        state="zero 3 over cp, uly",
        optimizer="adamw",
    ),
    Case(
        cp=2,
        uly=2,
        how="as zigzag",
        model="latent",
        kernels="triton",
        microbatches=2,
        state="zero 1 over cp",
        clip=0.05,
    ),
    Case(
        uly=4,
        kv=2,
        microbatches=2,
        gathered="regather",
        recompute="selective(silu)",
        state="zero 2 over uly",
    ),
    Case(dp=2, tp=2, rules="batch over dp  vocab, ffn over tp  seq over tp", valid="silent_rank"),
    Case(tp=2, sp=True, kv=4, microbatches=3, optimizer="groups", clip=0.05),
)
"""Two strategies together, more ranks, few heads of keys, and keys gathered where no heads lie."""
CASES = [*_cases(), REPLICAS, *BOTH]


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path), steps=2)


def test_few_programs_have_every_pair() -> None:
    """By brute force, for the generator is part of the proof; and every value of those that are
    alike occurs.
    """
    assert len(CASES) <= PROGRAMS
    assert all(1 < case.ranks <= RANKS for case in CASES)
    for a, b in combinations(FACTORS, 2):
        assert _pairs(a, FACTORS[a], b, FACTORS[b]) - IMPOSSIBLE <= {
            frozenset({(a, r[a]), (b, r[b])}) for r in ROWS
        }
    assert {case.schedule for case in CASES if case.pp > 1} == {*SCHEDULES}
    said = {re.sub("over dp, (cp|uly)(, uly)?", "over dp", case.state) for case in CASES}
    assert said >= {state for alike in SHARED.values() for state in alike}
    meshes = {(case.dp, case.cp, case.uly, case.tp, case.how) for case in CASES if case.pp == 1}
    whole = {"dp": 1, "cp": 1, "uly": 1, "tp": 1, "how": ""}
    assert meshes >= {
        tuple((whole | own).values()) for alike in ("dp", "tp", "both") for own in MESHES[alike]
    }
    contexts = {(case.cp, case.uly, case.how) for case in CASES}
    assert contexts >= {tuple(({"cp": 1, "uly": 1, "how": ""} | own).values()) for own in CONTEXTS}
