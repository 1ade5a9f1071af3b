"""Mistakes that show when a program runs: against plain torch in one process, in the record of its
collectives, in the hashes of its copies; and those that an optimizer hides.

Where it is the program that is wrong, emission refuses it beforehand: the other tests in this
folder show that.
"""

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.oracle import harness, reference
from helpers.oracle.plans import Case
from helpers.planted_defects import Defect
from helpers.planted_runs import first_step, planted, record, right_step, sanitizer, wrong_gradients
from scalec.runtime.comm import collectives
from scalec.runtime.state import flat_param, parameters

SEED = "(loss_sum * inv_num_tokens).backward()"


def test_row_04_only_the_last_microbatch_is_kept(tmp_path: Path) -> None:
    """The loss looks fine; the gradients do not (Automodel PR #3530)."""
    case = Case(microbatches=2)
    got, right = (
        first_step(case, planted(case, tmp_path, {SEED: f"state.zero(); {SEED}"})),
        right_step(case),
    )
    assert got.loss == pytest.approx(right.loss, rel=1e-12)
    assert wrong_gradients(got, right) == {*right.gradients}


def test_row_08_weights_on_every_rank_are_counted_by_every_rank(tmp_path: Path) -> None:
    """Every gradient is right, and their norm too large (ROCm/TransformerEngine#715)."""
    case = Case(tp=2, clip=0.05)
    own = 'sum_squares(gradients["vectors"])'
    counted = own.replace("sum_squares", "all_reduce_(sum_squares").replace('"])', '"]), tp)')
    got, right = first_step(case, planted(case, tmp_path, {own: counted})), right_step(case)
    assert wrong_gradients(got, right) == set()
    assert got.norm > 1.001 * right.norm


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_row_11_adamw_hides_the_scale_of_gradients(optimizer: str, tmp_path: Path) -> None:
    """After a step with gradients twice as large AdamW's parameters are where they should be, to
    two digits of how far they moved; SGD's moved twice as far.  The proof compares gradients
    (`test_accumulation`)."""
    case = Case(optimizer=optimizer)
    got = first_step(
        case, planted(case, tmp_path, {SEED: SEED.replace("inv_num_tokens", "inv_num_tokens * 2")})
    )
    right, start = right_step(case), reference.initial(case.config)
    apart, moved = (_apart(got.parameters, other) for other in (right.parameters, start))
    assert wrong_gradients(got, right) == {*right.gradients}
    if optimizer == "adamw":
        assert apart < 1e-2 * moved
    else:
        assert apart == pytest.approx(moved / 2, rel=0.05)


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """How far apart two sets of parameters are."""
    return torch.cat([(a[name] - b[name]).flatten() for name in a]).norm().item()


def test_row_17_copies_of_a_weight_part(tmp_path: Path) -> None:
    """Each rank learned from its own tokens, and routers came to differ (torchtitan#2387, PR #2416,
    #1805).  Here the norms under sequence parallelism; the first step ends the run."""
    case = Case(tp=2, sp=True)
    module = planted(case, tmp_path, {'all_reduce_(gradients["vectors"], tp)': "pass"})
    assert "is not the same over tp: rank 0 differs from rank 1" in sanitizer(case, module)


def test_row_22_an_all_reduce_whose_backward_is_an_all_reduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's own functional collectives differentiate: loss right, gradients multiplied by the
    ranks (pytorch#172932).  Only the runtime is wrong, which neither the proof nor the read-back
    looks into."""
    again = collectives._conjugate("Again", "PI", collectives._reduce, collectives._reduce)
    monkeypatch.setattr(collectives, "_all_reduce_sum", again)
    case = Case(tp=2)
    got, right = first_step(case, harness.load_case(case, tmp_path)), right_step(case)
    assert got.loss == pytest.approx(right.loss, rel=1e-12)
    torch.testing.assert_close(got.gradients["head"], 2 * right.gradients["head"])


def test_row_24_gathered_logits_add_the_logarithm_of_the_ranks(tmp_path: Path) -> None:
    """Each rank sums the exponentials of the whole vocabulary, and then the ranks are added
    (Megatron#7452, row 2).
    """
    case = Case(tp=2, valid="all")
    logits = "logits = linear(n, self.head)"
    whole = logits.replace(
        "linear(n, self.head)", "all_gather(linear(n, self.head), self.tp, dim=2)"
    )
    edits = {"    all_reduce,": "    all_gather,\n        all_reduce,", logits: whole}
    got, right = first_step(case, planted(case, tmp_path, edits)), right_step(case)
    assert got.loss == pytest.approx(right.loss + log(2), rel=1e-12)


def test_row_27_another_mesh_is_built_than_the_plans(tmp_path: Path) -> None:
    """What is recorded has other groups (UniRL PR #410)."""
    case = Case(dp=2, tp=2)
    module = harness.load_case(case, tmp_path)
    assert record(module, tmp_path).equal
    turned = record(module, tmp_path, dict(reversed(module.PLAN.mesh.items())))
    assert {found.what for found in turned.differences} == {"another group"}
    assert [found.rank for found in turned.differences] == [0, 1, 2, 3]


def test_row_29_every_rank_clips_by_its_own_norm(tmp_path: Path) -> None:
    """Copies of one weight part, and the first step ends the run (RLinf PR #1542)."""
    case = Case(tp=2, clip=0.05)
    reduced = 'all_reduce_(sum_squares(gradients["matrices"]), tp)'
    own = {reduced: 'sum_squares(gradients["matrices"])'}
    assert sanitizer(case, planted(case, tmp_path, own)).startswith(
        "step 1, update: layers.0.norm1[0] is not the same over tp"
    )


def test_row_30_initial_values_that_depend_on_the_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank drew its part as if it were the first (pytorch#168058, Megatron#206, torchtitan PR
    #4600).  Nothing but a run looks at initial values."""
    one, two = (harness.load_case(case, tmp_path) for case in (Case(), Case(tp=2)))
    right = harness.initial(Case(), one, seed=5)
    assert _differing(right, harness.initial(Case(tp=2), two, seed=5)) == set()

    def first(values: Tensor, spec: parameters.Spec, *rest: Any) -> None:
        parameters.initialise(values, replace(spec, split={}), *rest)

    monkeypatch.setattr(flat_param, "initialise", first)
    assert {"wte", "layers.0.wq"} < _differing(right, harness.initial(Case(tp=2), two, seed=5))


def _differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {name for name, value in a.items() if not torch.equal(value, b[name])}


def test_row_33_each_rank_decides_by_itself_whether_to_update(tmp_path: Path) -> None:
    """The rank without labels keeps its weights, the other does not (ColossalAI PR #1175)."""
    case = Case(dp=2, valid="silent_rank")
    module = planted(
        case, tmp_path, {"skip=num_tokens == 0": "skip=count_valid(batch.labels) == 0"}
    )
    with pytest.raises(AssertionError, match="copies on two ranks differ"):
        first_step(case, module)


FIRST, SECOND = 'all_reduce_(gradients["matrices"], dp)', 'all_reduce_(gradients["vectors"], dp_tp)'
ORDERED = f"""first = lambda: {FIRST}
    second = lambda: {SECOND}
    for reduce in [second, first] if mesh.rank("dp") else [first, second]:
        reduce()"""


def test_row_34_ranks_take_two_groups_in_different_order(tmp_path: Path) -> None:
    """A deadlock where groups overlap (torchrec PR #4149, ROCm/rccl#2191, nccl#296): the emitted
    text is straight-line code without ranks in it, and the record of such a run cannot be played.
    """
    defect = Defect("llama", text={FIRST: ORDERED, f"    {SECOND}  # P": "    # P"})
    assert (
        "`lambda: all_reduce_(gradients['matrices'], dp)` is no part of a program"
        in defect.emission()
    )
    case = Case(dp=2, tp=2, sp=True)
    found = record(planted(case, tmp_path, defect.text), tmp_path)
    assert {each.what for each in found.differences} == {"another order"}
    assert found.disorder[0] == "ranks wait for each other for ever"
