"""Gradients that are summed in an element type of their own: the sums are the same wherever
buckets lie.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.oracle import harness, reference
from helpers.oracle.plans import Case, plan_text
from helpers.programs import load_program

LR = 0.01
WHOLE = ""
LAYERS_OF_STAGE = (
    "bucket = 1KiB",
    "zero 1 over dp  bucket = 1KiB",
    "zero 2 over dp",
    "zero 3 over dp",
)


def _gradients(state: str, reduce: str, folder: Path) -> dict[str, Tensor]:
    """Of one microbatch: of several, parts would be rounded before they add up, or after."""
    case = Case(dp=2, precision="fp32", state=state)
    text = (
        plan_text(case).replace("gathered =", f"reduce = {reduce}  gathered =")
        if reduce
        else plan_text(case)
    )
    module = load_program(text, folder)
    start, batches = reference.initial(case.config), list(harness.batches(case, 1))
    return harness.run(case, module, start, batches, LR)[0].gradients


@pytest.mark.sample(1)
@pytest.mark.parametrize("state", LAYERS_OF_STAGE)
def test_turns_send_what_a_whole_bucket_sends(state: str, tmp_path: Path) -> None:
    whole, layers, wide = (
        _gradients(each, reduce, tmp_path / name)
        for each, reduce, name in (
            (WHOLE, "bf16", "whole"),
            (state, "bf16", "layers"),
            (state, "", "wide"),
        )
    )
    assert all(torch.equal(layers[name], gradient) for name, gradient in whole.items())
    assert not any(torch.equal(wide[name], gradient) for name, gradient in whole.items())
