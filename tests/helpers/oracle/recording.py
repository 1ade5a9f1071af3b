"""Runs an emitted program under SCALEC_RECORD=1 and holds what it communicated to its plan."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from helpers.launched import run_recorded, text_files
from scalec.compiler.proof.recorded import Recorded, compare


def recorded(module: ModuleType, folder: Path, options: str) -> Recorded:
    """The comparison of a run in `folder`."""
    text_files(folder)
    plan = replace(module.PLAN, data=replace(module.PLAN.data, holdout=0.5))
    ended = run_recorded(
        folder, plan, module.build, module.train_step, module.eval_step, f"{options} --data text/*.txt"
    )
    assert [status for status, _ in ended] == [0] * len(ended), ended
    return compare(folder / "runs" / plan.name / "recorded")
