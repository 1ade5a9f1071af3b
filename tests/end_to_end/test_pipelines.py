"""Emitted programs in stages against the reference: loss, every gradient, their norm, parameters
after each step.

Every pair of these; in few programs, `test_crossings`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from end_to_end.test_numbers import compare
from helpers.oracle import harness
from helpers.oracle.all_pairs import Pair, all_pairs
from helpers.oracle.plans import Case
from scalec.compiler.schedules.actions import ScheduleError
from scalec.compiler.schedules.registry import SCHEDULES as MAKERS

SCHEDULES = (
    *("gpipe", "1f1b", "interleaved_1f1b(chunks=2)", "breadth_first(chunks=2)"),
    *("zb_h1", "zb_h2", "interleaved_zero_bubble(chunks=2)", "zbv", "dualpipev"),
)
SHARED = ("zero 1 over dp", "zero 2 over dp", "zero 3 over dp")
FACTORS = {
    "pp": (2, 3, 4),
    "schedule": SCHEDULES,
    "state": ("", *SHARED, "bucket = 1KiB"),
    "microbatches": (1, 2, 3, 4, 6, 8, 9),
    "model": ("llama", "tied", "parallel", "every"),
    "layers": (2, 4, 7),
    "dp": (1, 2),
    "tp": (1, 2),
    "sp": (False, True),
    "recompute": ("none", "full", "every(2, layers)", "selective(attention, silu)"),
    "valid": ("uneven", "silent_microbatch"),
    "optimizer": ("sgd", "adamw", "groups"),
    "clip": (0.0, 0.05),
}
TWO_EACH = tuple(name for name in SCHEDULES if "chunks" in name or name in ("zbv", "dualpipev"))
IMPOSSIBLE: frozenset[Pair] = frozenset(
    {
        frozenset({("microbatches", 1), ("valid", "silent_microbatch")}),
        *(frozenset({("layers", 2), ("schedule", name)}) for name in TWO_EACH),
        # more than 8 ranks, or stages than layers
        *(frozenset({("pp", 4), (name, 2)}) for name in ("dp", "tp")),
        *(
            frozenset({("pp", 4), ("schedule", name)})
            for name in ("dualpipev", "breadth_first(chunks=2)")
        ),
        *(frozenset({("pp", pp), each}) for pp, each in ((3, ("tp", 2)), (4, ("layers", 4)))),
        # state that nothing shares out
        *(
            frozenset({("state", state), each})
            for state in SHARED
            for each in (("dp", 1), ("pp", 4))
        ),
        # what the reference has not
        *(frozenset({("model", "every"), each}) for each in (("tp", 2), ("optimizer", "groups"))),
    }
)


def possible(case: Case) -> Case:
    """The case, with as many more microbatches as its schedule needs."""
    try:
        MAKERS[case.schedule.partition("(")[0]](case.pp, case.microbatches)
    except ScheduleError:
        return possible(replace(case, microbatches=case.microbatches + 1))
    return case


WITHOUT_TURNS = (  # of the first stage, and of the last
    Case(
        pp=2,
        tp=2,
        dp=2,
        sp=True,
        stages="[0, 2]",
        model="tied",
        microbatches=3,
        clip=0.05,
        optimizer="adamw",
    ),
    Case(pp=2, tp=2, stages="[2, 0]", schedule="zb_h1", microbatches=3, state="bucket = 1KiB"),
    Case(pp=3, tp=2, stages="[0, 2, 0]", schedule="zb_h2", microbatches=4, clip=0.05),
)
REDUCED_WHOLE = Case(
    pp=2, dp=2, microbatches=4, layers=4, schedule="interleaved_1f1b(chunks=2)", model="tied"
)
CASES = [
    *dict.fromkeys(possible(Case(**case)) for case in all_pairs(FACTORS, IMPOSSIBLE)),
    REDUCED_WHOLE,
]


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *WITHOUT_TURNS], ids=str)
def test_three_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path))


def test_every_schedule_is_run() -> None:
    """A new one needs a place in `SCHEDULES`; the others that `make test-long` runs are made of
    it.
    """
    assert {name.partition("(")[0] for name in SCHEDULES} == MAKERS.keys()
