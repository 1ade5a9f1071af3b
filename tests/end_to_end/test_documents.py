"""Documents in one sequence: emitted programs against each document by itself, in one process and
in float64.

What is held together here: which document a token is of and which labels count (the runtime's
samples), the mask of attention, and that rotary positions are relative, so that they need not begin
anew.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.oracle import harness, reference
from helpers.oracle.plans import SEQ, Case, plan_text
from helpers.oracle.reference import Config, Tensors
from helpers.programs import load_program
from scalec.runtime.data.samples import Windows

SEPARATOR = 10
LR = 0.01
CASES = (
    Case(),
    Case(dp=2, tp=2, sp=True, microbatches=2),
    Case(dp=2, tp=2, sp=True, microbatches=2, gathered="regather"),
    Case(tp=4, kv=2),
    Case(cp=2, how="as zigzag", microbatches=2),
    Case(cp=4, how="as zigzag via ring", kv=1),
    Case(cp=2, how="via ring", gathered="regather", recompute="full"),
    Case(uly=2, tp=2, sp=True, kv=4),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sequence_of_documents_is_each_of_them_alone(case: Case, tmp_path: Path) -> None:
    module = load_program(document_plan(case), tmp_path)
    windows, start = windows_of(case.rows, case.config.vocab), reference.initial(case.config)
    batch = given(windows, module.PLAN.inputs)
    (step,) = harness.run(case, module, start, [batch], LR)
    loss, gradients = alone(case.config, start, windows)
    assert step.loss == pytest.approx(loss, rel=1e-10, abs=0)
    assert (
        harness.evaluate(case, module, start, batch)
        == [pytest.approx(loss, rel=1e-10, abs=0)] * case.ranks
    )
    for name, expected in gradients.items():
        error, scale = (
            (step.gradients[name] - expected).abs().max().item(),
            expected.abs().max().item(),
        )
        assert error <= 1e-10 * scale, (
            f"gradient of {name}: off by {error:.3g}, the largest element is {scale:.3g}"
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["", "as zigzag", "via ring", "as zigzag via ring"])
@pytest.mark.parametrize("window", [2, 5])
def test_windows_of_documents_are_the_same_over_ranks(
    how: str, window: int, tmp_path: Path
) -> None:
    """A window beside documents, and a cap of scores: over ranks as on one."""
    found = [
        windowed(case, window, tmp_path)
        for case in (Case(microbatches=2), Case(cp=2, how=how, microbatches=2))
    ]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10, abs=0)
    for name, expected in found[0][1].items():
        torch.testing.assert_close(
            found[1][1][name], expected, rtol=0, atol=1e-10 * expected.abs().max().item()
        )


def windowed(case: Case, window: int, folder: Path) -> tuple[float, Tensors]:
    """Loss and gradients of a step whose attention has a window and a cap."""
    text = windowed_plan(case, window)
    module = load_program(text, folder / str(case))
    batch = given(windows_of(case.rows, case.config.vocab), module.PLAN.inputs)
    (step,) = harness.run(case, module, reference.initial(case.config), [batch], LR)
    return step.loss, step.gradients


def windowed_plan(case: Case, window: int) -> str:
    """Such a plan whose attention has a window and a cap besides."""
    return document_plan(case).replace("mask=causal", f"mask=causal, window={window}, softcap=2")


def document_plan(case: Case) -> str:
    """A plan whose attention sees no other document."""
    text = plan_text(case).replace(
        "labels[batch, seq]", "labels[batch, seq], documents[batch, seq]"
    )
    text = text.replace("mask=causal", "mask=causal, documents=documents")
    return text.replace("tokenizer = bytes", f"separator = {SEPARATOR}")


def given(windows: Tensor, inputs: Sequence[str]) -> harness.Inputs:
    """The inputs of a model that the runtime makes of windows."""
    made = Windows(separator=SEPARATOR).make_inputs(windows, [0] * len(windows), 32, seed=0)
    return tuple(made[name] for name in inputs)


def windows_of(rows: int, vocab: int) -> Tensor:
    """Documents of a few tokens, of one, and a window without an end of any."""
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(SEPARATOR + 1, vocab, (rows, SEQ + 1), generator=generator)
    ends = torch.rand(rows, SEQ + 1, generator=generator) < 0.3
    ends[0] = False
    return windows.masked_fill(ends, SEPARATOR)


def alone(config: Config, start: Tensors, windows: Tensor) -> tuple[float, Tensors]:
    """The mean loss of all tokens but the first of each document, and its gradients."""
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    documents = [part for window in windows for part in _parts(window) if len(part) > 1]
    sums = [reference.loss(config, leaves, part[None, :-1], part[None, 1:]) for part in documents]
    mean = torch.stack(sums).sum() / sum(len(part) - 1 for part in documents)
    return mean.item(), dict(
        zip(leaves, torch.autograd.grad(mean, list(leaves.values())), strict=True)
    )


def _parts(window: Tensor) -> list[Tensor]:
    """The documents of a window, each with the separator that ends it."""
    ends = [i + 1 for i, token in enumerate(window.tolist()) if token == SEPARATOR]
    return [window[start:end] for start, end in pairwise([0, *ends, len(window)])]
