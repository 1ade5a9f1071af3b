"""A soak: 20,000 steps on four ranks under faults, bit for bit those of a run that nothing
disturbs.
"""

import faulthandler
import runpy
from pathlib import Path
from typing import Any

import pytest

SOAK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "soak.py"))


def test_memory_grows_by_its_slope() -> None:
    """The first quarter, in which a rank allocates what it keeps, does not count, nor do single
    samples.
    """
    growth = SOAK["Growth"]()
    for sample in range(400):
        began = 10**6 * (sample >= 50)
        growth.memory.append([began, began + 20 * 10 * sample + (-1) ** sample * 5_000])
    assert growth.slope(4_000) == pytest.approx(20, abs=1)


@pytest.mark.long
def test_a_run_under_faults_is_the_undisturbed_one(tmp_path: Path) -> None:
    # it takes longer than a test may: each of its starts has a limit
    faulthandler.cancel_dump_traceback_later()
    tally, growth = SOAK["soak"](tmp_path, steps=20_000, faults=60, save_every=100, seed=0)
    assert tally.defects == [], "\n".join(SOAK["lines"](tally, growth))
    assert tally.strikes.total() >= 60
