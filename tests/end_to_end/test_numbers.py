"""Emitted programs against the reference: loss, every gradient, their norm, and parameters after
each step.

Every pair of ways to shard and to train; in few programs, `test_crossings`.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from helpers.oracle import harness, matrix, reference
from helpers.oracle.all_pairs import all_pairs
from helpers.oracle.plans import Case, plan_text
from helpers.oracle.reference import Step, Tensors
from helpers.programs import import_module, write_program
from scalec.compiler.syntax.diagnostics import PlanError

LR = 0.01
FACTORS = {**matrix.FACTORS, "model": ("llama", "tied", "parallel")}
MORE = (
    Case(replicas=2, dp=2, tp=2, sp=True, microbatches=2, optimizer="adamw", clip=0.05),
    Case(replicas=2, dp=2, tp=1, valid="silent_rank", optimizer="momentum", model="tied"),
    Case(
        dp=2,
        tp=4,
        sp=True,
        kv=1,
        microbatches=2,
        gathered="regather",
        optimizer="groups",
        clip=0.05,
    ),
    Case(dp=2, tp=4, kv=2, vocab=False, model="parallel", optimizer="momentum"),
    Case(tp=4, sp=True, kv=2, vocab=False, model="tied", optimizer="momentum", clip=0.05),
    Case(dp=2, tp=2, sp=True, microbatches=2, recompute="full"),
    Case(
        dp=2, tp=2, sp=True, recompute="full", gathered="regather", optimizer="adamw", model="tied"
    ),
    Case(dp=2, tp=2, sp=True, microbatches=2, recompute="selective(attention, silu)"),
    Case(
        dp=2,
        tp=2,
        sp=True,
        recompute="selective(rmsnorm, rope, attention)",
        gathered="regather",
        model="every",
    ),
    Case(dp=2, tp=2, recompute="full", model="every", microbatches=2),
    Case(tp=4, sp=True, kv=2, recompute="full", model="parallel"),
    Case(model="every", valid="all"),
    Case(dp=2, tp=2, model="every", microbatches=2),
    Case(
        dp=2,
        tp=2,
        sp=True,
        model="every",
        microbatches=2,
        optimizer="adamw",
        clip=0.05,
        gathered="regather",
    ),
    Case(tp=4, sp=True, kv=2, model="every"),
    Case(dp=2, tp=4, kv=1, vocab=False, model="every"),
    Case(dp=2, tp=2, sp=True, padded=True, smoothing=0.1, z=0.01, microbatches=2),
    Case(tp=2, vocab=False, padded=True, smoothing=0.1, z=0.01, model="tied"),
    Case(
        replicas=2,
        dp=2,
        tp=2,
        sp=True,
        microbatches=2,
        optimizer="groups",
        clip=0.05,
        state="zero 1 over dp",
    ),
    Case(replicas=2, dp=2, optimizer="adamw", clip=0.05, state="zero 1 over replica, dp"),
    Case(dp=3, tp=2, model="every", optimizer="adamw", clip=0.05, state="optimizer over dp"),
    Case(dp=8, kv=1, optimizer="momentum", valid="silent_rank", state="zero 1 over dp"),
)
SHARED = (
    Case(
        replicas=2,
        dp=2,
        tp=2,
        sp=True,
        microbatches=2,
        optimizer="groups",
        clip=0.05,
        state="zero 3 over dp",
    ),
    Case(
        replicas=2,
        dp=2,
        optimizer="adamw",
        clip=0.05,
        state="zero 3 over replica, dp",
        recompute="full",
    ),
    Case(
        dp=3,
        tp=2,
        model="every",
        optimizer="adamw",
        clip=0.05,
        state="zero 3 over dp  prefetch = 2",
    ),
    Case(dp=8, kv=1, optimizer="momentum", valid="silent_rank", state="zero 2 over dp"),
)
FUSED = (
    Case(kernels="triton", model="every", valid="all"),
    Case(dp=2, tp=2, sp=True, kernels="triton", padded=True, smoothing=0.1, z=0.01, microbatches=2),
    Case(
        tp=2,
        vocab=False,
        kernels="triton",
        padded=True,
        smoothing=0.1,
        z=0.01,
        model="tied",
        optimizer="adamw",
    ),
    Case(tp=4, kv=1, kernels="triton", padded=True, smoothing=0.1, model="tied", recompute="full"),
    Case(
        dp=2, tp=2, sp=True, kernels="triton", model="every", microbatches=2, state="zero 3 over dp"
    ),
    Case(
        tp=2,
        vocab=False,
        kernels="triton",
        z=0.01,
        recompute="selective(cross_entropy, rmsnorm, rope)",
    ),
)
LAYOUTS = ("", "as zigzag", "via ring", "as zigzag via ring")
CONTEXT = (
    *(
        Case(
            dp=2,
            cp=2,
            tp=2,
            sp=True,
            how=how,
            state="zero 3 over dp, cp",
            optimizer="adamw",
            clip=0.05,
        )
        for how in LAYOUTS
    ),
    *(
        Case(dp=2, cp=4, how=how, gathered="regather", recompute="full", kv=1, model="parallel")
        for how in LAYOUTS
    ),
    *(
        Case(
            dp=2,
            cp=4,
            how=how,
            kernels="triton",
            model="every",
            valid="silent_rank",
            microbatches=2,
        )
        for how in LAYOUTS
    ),
    *(
        Case(cp=2, uly=2, how=how, kv=4, microbatches=2, state="zero 2 over cp, uly", model="tied")
        for how in LAYOUTS
    ),
    *(
        Case(pp=2, cp=2, tp=2, sp=True, how=how, microbatches=3, state="zero 1 over cp", layers=4)
        for how in LAYOUTS
    ),
    *(
        Case(cp=2, uly=2, tp=2, sp=True, how=how, kv=2, recompute="selective(attention, silu)")
        for how in LAYOUTS[::2]
    ),
    Case(
        dp=2,
        uly=4,
        kv=2,
        gathered="regather",
        optimizer="groups",
        clip=0.05,
        state="zero 1 over dp, uly",
    ),
    Case(
        dp=2,
        uly=2,
        tp=2,
        sp=True,
        kv=1,
        kernels="triton",
        state="zero 3 over dp, uly",
        recompute="full",
    ),
)
CASES = [
    *(Case(**case) for case in all_pairs(FACTORS, matrix.IMPOSSIBLE)),
    *MORE,
    *SHARED,
    *FUSED,
    *CONTEXT,
]


def _close(name: str, got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Relative to the largest element of what is expected."""
    error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
    assert error <= tolerance * scale, (
        f"{name}: off by {error:.3g}, where the largest element is {scale:.3g}"
    )


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_one_process(case: Case, tmp_path: Path) -> None:
    compare(case, harness.load_case(case, tmp_path))


def compare(case: Case, module: ModuleType, steps: int = 3, start: Tensors | None = None) -> None:
    """So many steps against the reference."""
    start, batches = start or reference.initial(case.config), list(harness.batches(case, steps))
    expected = reference.run(case.config, case.training, start, batches, LR)
    assert_steps_equal(harness.run(case, module, start, batches, LR), expected)


def assert_steps_equal(emitted: Sequence[Step], expected: Sequence[Step]) -> None:
    """Losses, every gradient, their norm and every parameter, to 1e-10."""
    for number, (got, want) in enumerate(zip(emitted, expected, strict=True)):
        at = f"step {number}: "
        assert got.loss == pytest.approx(want.loss, rel=1e-10, abs=0), at
        assert got.router_loss == pytest.approx(want.router_loss, rel=1e-10, abs=0), at
        assert [load.tolist() for load in got.loads] == [load.tolist() for load in want.loads], at
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            _close(f"{at}gradient of {name}", got.gradients[name], gradient)
        assert got.norm == pytest.approx(want.norm, rel=1e-10, abs=0), at
        for name, parameter in want.parameters.items():
            _close(at + name, got.parameters[name], parameter)


MUTANTS = (
    (
        'all_reduce_(gradients["vectors"], dp_tp)',
        'all_reduce_(gradients["vectors"], dp)',
    ),
    ('all_reduce_(gradients["matrices"], dp)', ""),
    ("(loss_sum * inv_num_tokens)", "(loss_sum * inv_num_tokens * 2)"),
    (
        "num_tokens = all_reduce_(count_valid(batch.labels), dp)",
        "num_tokens = count_valid(batch.labels)",
    ),
    ("loss += loss_sum.detach()", "loss = loss_sum.detach()"),
    ('all_reduce_(sum_squares(gradients["matrices"]), tp)', 'sum_squares(gradients["matrices"])'),
    ("reduce_scatter(y, self.tp, dim=0)", "reduce_scatter(y * 1.000001, self.tp, dim=0)"),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("right", "wrong"), MUTANTS, ids=[right for right, _ in MUTANTS])
def test_a_wrong_program_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    case = Case(dp=2, tp=2, sp=True, microbatches=2)
    script = write_program(plan_text(case), tmp_path) / "train.py"
    text = script.read_text()
    assert right in text
    script.write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError):
        compare(case, import_module(script), steps=1)


def test_the_pairs_are_all_there() -> None:
    """The generator is part of the proof, so it is checked by brute force."""
    names = list(FACTORS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            there = {(getattr(case, a), getattr(case, b)) for case in CASES}
            wanted = {
                (x, y)
                for x in FACTORS[a]
                for y in FACTORS[b]
                if frozenset({(a, x), (b, y)}) not in matrix.IMPOSSIBLE
            }
            assert wanted <= there


RULES = (
    "batch over dp  ffn over tp",
    "batch over dp  vocab over tp",
    "batch over dp  vocab over dp, tp  heads, kv_heads, ffn over tp",
    "heads, kv_heads over tp  ffn over dp, tp  batch over dp",
    "batch over dp  hidden over tp",
    "batch over dp  seq over tp",
    "batch over dp  seq over dp  heads, kv_heads, ffn over tp",
    # kv_heads on each rank: which of them a head attends to depends on the rank
    "batch over dp  heads, ffn over tp",
    "batch over dp  kv_heads, ffn over tp",
    "batch over dp  heads over tp  kv_heads over tp  ffn over tp",
    "batch over dp  kv_heads over tp  heads over tp  ffn over tp",
)


APART = [rules for rules in RULES if "heads" in rules and "heads, kv_heads, ffn" not in rules]
HEADS = [(rules, 2) for rules in RULES] + [(rules, 1) for rules in APART]
MORE_HEADS = [each for each in product(RULES, (4, 2, 1)) if each not in HEADS]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("rules", "kv"), [*HEADS, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE_HEADS)]
)
def test_other_rules_are_right_or_refused(rules: str, kv: int, tmp_path: Path) -> None:
    """However a plan shards: three steps equal one process, or a diagnostic says why not."""
    case = Case(dp=2, tp=2, kv=kv, rules=rules, microbatches=2, optimizer="adamw", clip=0.05)
    try:
        module = harness.load_case(case, tmp_path)
    except PlanError:
        return
    compare(case, module)


@pytest.mark.sample(1)
@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("optimizer", ["momentum", "groups"])
def test_a_step_without_valid_tokens_changes_nothing(
    optimizer: str, empty: int, tmp_path: Path
) -> None:
    """Not one bit of any parameter; and the steps around it go on as if it had not been."""
    case = Case(dp=2, tp=2, sp=True, optimizer=optimizer, clip=0.05, microbatches=2)
    start, batches = reference.initial(case.config), list(harness.batches(case, 3))
    batches[empty] = (batches[empty][0], torch.full_like(batches[empty][1], -100))
    steps = harness.run(case, harness.load_case(case, tmp_path), start, batches, LR)
    assert (steps[empty].loss, steps[empty].norm) == (0, 0)
    before = steps[empty - 1].parameters if empty else start
    assert all(torch.equal(steps[empty].parameters[name], value) for name, value in before.items())
    others = [batch for number, batch in enumerate(batches) if number != empty]
    expected = reference.run(case.config, case.training, start, others, LR)
    for name, value in expected[-1].parameters.items():
        _close(name, steps[-1].parameters[name], value)


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, tp=2, sp=True, gathered="regather", microbatches=2),
        Case(dp=2, tp=2, vocab=False, kv=1),
    ],
    ids=str,
)
def test_the_validation_loss_equals_one_process(case: Case, tmp_path: Path) -> None:
    start, (batch,) = reference.initial(case.config), harness.batches(case, 1)
    expected = reference.run(case.config, case.training, start, [batch], LR)[0].loss
    losses = harness.evaluate(case, harness.load_case(case, tmp_path), start, batch)
    assert losses == [pytest.approx(expected, rel=1e-10)] * case.ranks


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 1e-4), ("fp32  reduce = bf16", 0.01), ("fp16", 0.01), ("bf16", 0.05)],
)
def test_narrower_precisions_come_near(precision: str, tolerance: float, tmp_path: Path) -> None:
    case = Case(dp=2, tp=2, sp=True, microbatches=2, precision=precision, optimizer="sgd")
    start, batches = reference.initial(case.config), list(harness.batches(case, 3))
    expected = reference.run(case.config, case.training, start, batches, LR)
    steps = harness.run(case, harness.load_case(case, tmp_path), start, batches, LR)
    for got, want in zip(steps, expected, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=tolerance)
        assert got.norm == pytest.approx(want.norm, rel=tolerance)
        for name, value in want.parameters.items():
            _close(name, got.parameters[name].double(), value, tolerance)


def test_initial_values_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    for kv in (1, 2):
        one = _initial(Case(kv=kv), tmp_path / "one")
        for case in (
            Case(dp=2, tp=2, sp=True, kv=kv),
            Case(tp=4, kv=kv),
            Case(dp=3, kv=kv),
            Case(tp=2, vocab=False, kv=kv),
        ):
            assert all(
                torch.equal(one[name], value)
                for name, value in _initial(case, tmp_path / "other").items()
            )


def _initial(case: Case, folder: Path) -> dict[str, Tensor]:
    return harness.initial(case, harness.load_case(case, folder), seed=5)


def test_the_learning_rate_is_the_plans(tmp_path: Path) -> None:
    plan = harness.load_case(Case(), tmp_path).PLAN
    for step in range(10):
        expected = reference.cosine(step, 10, 0.01, warmup=2, floor=1e-3)
        assert plan.schedule.lr(step, 10, plan.lr) == pytest.approx(expected, rel=1e-12)
