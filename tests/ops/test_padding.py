"""A vocabulary with padding: never counted, never predicted, and nothing else can have any."""

import pytest
import torch
from attrs import evolve

from helpers.plan_table import PLANS
from helpers.small_plans import DIMS, Plan
from scalec.compiler.analysis.communication import parameter_count
from scalec.compiler.emit import emit
from scalec.compiler.emit.readback import check
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.runtime.ops.token_losses import (
    cross_entropy,
    local_softmax_stats,
    max_logit,
    token_loss,
)
from scalec.testing import assert_equal_step

PADDED = DIMS.replace("vocab = 12", "vocab = 9 pad 4")
NAMES = ["data, tensor, sequence", "tied embedding", "vocabulary whole", "vocabulary alone"]


def plan(name: str) -> Plan:
    """A plan of the table whose vocabulary of 9 is padded to 12."""
    assert PADDED != DIMS
    return evolve(PLANS[name], dims=PADDED)


@pytest.mark.parametrize("name", NAMES)
def test_the_step_is_that_of_a_single_device(name: str) -> None:
    assert_equal_step(plan(name).text())


def test_padding_is_not_counted() -> None:
    without = evolve(
        plan(NAMES[0]), dims=DIMS.replace("vocab = 12", "vocab = 9"), shard="batch over dp"
    )
    assert parameter_count(plan(NAMES[0]).program()) == parameter_count(without.program("resolve"))


def test_the_ir_says_what_is_padding() -> None:
    program = plan(NAMES[0]).program()
    assert "dim vocab = 12 of 9 !" in print_ir(program)
    assert read_ir(Source("p.ir", print_ir(program))) == program


def test_the_program_is_told_how_many_classes_there_are() -> None:
    model = plan(NAMES[0]).program("resolve")
    program = lower(model)
    text = emit(program, Source("p.scale", ""), model, verify(program, model))["train.py"]
    assert "max_logit(logits, self.tp, classes=9)" in text
    assert "local_softmax_stats(logits, logits_max, labels, self.tp, classes=9)" in text
    assert "vocab=9," in text
    for wrong in ("classes=10", "classes=12"):
        with pytest.raises(AssertionError, match=r"nothing in the IR does `local_softmax_stats\("):
            check(text.replace("labels, self.tp, classes=9", f"labels, self.tp, {wrong}"), program)


def test_no_probability_goes_to_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 8, -1])
    padded, plain = logits.clone().requires_grad_(), logits[:, :9].clone().requires_grad_()
    loss = cross_entropy(padded, labels, classes=9)
    assert loss == cross_entropy(plain, labels)
    loss.backward()
    cross_entropy(plain, labels).backward()
    assert padded.grad is not None
    assert plain.grad is not None
    assert torch.equal(padded.grad[:, :9], plain.grad)
    assert not padded.grad[:, 9:].any()
    peak = max_logit(logits, classes=9)
    assert torch.equal(peak, logits[:, :9].amax(-1))
    z, t = local_softmax_stats(logits, peak, labels, classes=9)
    assert torch.allclose(token_loss(z, t, labels), loss)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("hidden = 4", "hidden = 3 pad 4", "E0314"),
        ("ffn = 8", "ffn = 7 pad 4", "E0314"),
        ("vocab = 12", "vocab = 2 pad 12", "E0314"),
        ("vocab = 12", "vocab = 12 pad 0", "E0304"),
    ],
)
def test_what_cannot_be_padded(old: str, new: str, code: str) -> None:
    assert old in DIMS
    with pytest.raises(PlanError) as caught:
        evolve(PLANS[NAMES[0]], dims=DIMS.replace(old, new)).program()
    assert caught.value.diagnostics[0].code == code


def test_only_dims_are_padded() -> None:
    text = PLANS[NAMES[0]].text().replace("tp = 2", "tp = 2 pad 4", 1)
    with pytest.raises(PlanError, match="only a dim is padded"):
        compile_plan(Source("p.scale", text))


def test_only_a_watch_has_numbers_of_steps() -> None:
    text = PLANS[NAMES[0]].text().replace("tp = 2", "tp every 2", 1)
    with pytest.raises(PlanError, match="only `watch` has settings with `every`"):
        compile_plan(Source("p.scale", text))
