"""Emitted programs in stages against the reference: loss, every gradient, their norm, and parameters after each step."""

from pathlib import Path

import pytest

from oracle import harness, reference
from oracle.pairs import Pair, all_pairs
from oracle.plans import Case, plan_text
from oracle.test_numbers import LR, compare
from scalec.compiler.diagnostics import PlanError

SCHEDULES = (
    *("gpipe", "1f1b", "interleaved_1f1b(chunks=2)", "breadth_first(chunks=2)"),
    *("zb_h1", "zb_h2", "interleaved_zero_bubble(chunks=2)", "zbv", "dualpipev"),
)
FACTORS = {
    "pp": (2, 3, 4),
    "schedule": SCHEDULES,
    "microbatches": (1, 2, 3, 4, 6, 8, 9),
    "model": ("llama", "tied", "parallel", "every"),
    "layers": (2, 4, 7),
    "dp": (1, 2),
    "tp": (1, 2),
    "sp": (False, True),
    "state": ("", "zero 1 over dp", "zero 3 over dp", "bucket = 1KiB"),
    "recompute": ("none", "full", "every(2, layers)", "selective(attention, silu)"),
    "valid": ("uneven", "silent_microbatch"),
    "optimizer": ("sgd", "adamw", "groups"),
    "clip": (0.0, 0.05),
}
CHUNKED = tuple(name for name in SCHEDULES if "chunks" in name or name in ("zbv", "dualpipev"))
NEEDS = {
    # of pp ranks and so many stages, the first of these numbers of microbatches that a schedule takes
    "interleaved_1f1b(chunks=2)": lambda pp, m: m % pp == 0,
    "interleaved_zero_bubble(chunks=2)": lambda pp, m: m % pp == 0,
    "dualpipev": lambda pp, m: m >= 2 * pp,
    "zbv": lambda pp, m: m >= 1,
}
IMPOSSIBLE: frozenset[Pair] = frozenset(
    {
        frozenset({("microbatches", 1), ("valid", "silent_microbatch")}),
        *(frozenset({("layers", 2), ("schedule", name)}) for name in CHUNKED),
        *(frozenset({("pp", 4), (name, 2)}) for name in ("dp", "tp")),
        *(frozenset({("pp", 4), ("schedule", name)}) for name in ("dualpipev", "breadth_first(chunks=2)")),
        frozenset({("pp", 3), ("tp", 2)}),
        frozenset({("pp", 4), ("layers", 4)}),
        *(frozenset({("model", "every"), each}) for each in (("tp", 2), ("optimizer", "groups"))),
    }
)


def _possible(case: Case) -> Case | None:
    """The case, if its schedule takes its numbers."""
    try:
        harness.program(plan_text(case))
    except PlanError:
        return None
    return case


CASES = [Case(**case) for case in all_pairs(FACTORS, IMPOSSIBLE)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    try:
        module = harness.compiled(case, tmp_path)
    except PlanError as error:
        pytest.skip(str(error.diagnostics[0]))
    compare(case, module)
