"""Runs an emitted program under SCALEC_RECORD=1 and holds what it communicated to its plan."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

# torch imports it at a recorded call: here once, in place of in each forked rank
import torch._dynamo  # noqa: F401

from helpers.forked_ranks import plain_groups
from helpers.launched import run_recorded, text_files
from scalec.compiler.proof.recorded import Recorded, compare
from scalec.runtime.train import loop

EVALUATIONS = 2
"""After the last step: at most so many batches, where runs have more."""


def recorded(module: ModuleType, folder: Path, options: str) -> Recorded:
    """The comparison of a run in `folder`.

    Ranks' calls are compared by their records alone: at gloo's check those in different order would
    wait for ever.
    """
    text_files(folder)
    plan = replace(module.PLAN, data=replace(module.PLAN.data, holdout=0.5))
    with plain_groups(), patch.object(loop, "_EVAL_BATCHES", EVALUATIONS):
        ended = run_recorded(
            folder,
            plan,
            module.build,
            module.train_step,
            module.eval_step,
            f"{options} --data text/*.txt",
        )
    assert [status for status, _ in ended] == [0] * len(ended), ended
    return compare(folder / "runs" / plan.name / "recorded")
