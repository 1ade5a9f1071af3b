"""A soak: 20,000 steps on four ranks under faults, bit for bit those of a run that nothing disturbs."""

import faulthandler
import runpy
from pathlib import Path
from typing import Any

import pytest

SOAK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "soak.py"))


@pytest.mark.long
def test_a_run_under_faults_is_the_undisturbed_one(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # it takes longer than a test may: each of its starts has a limit
    tally, growth = SOAK["soak"](tmp_path, steps=20_000, faults=60, save_every=100, seed=0)
    assert tally.defects == [], "\n".join(SOAK["lines"](tally, growth))
    assert tally.strikes.total() >= 60
