"""Mixtures of experts that train and are wrong: rows 12, 50, 52, 55, 56, 60, 61.

Others are planted elsewhere, or need a feature that is not there (`test_rows`).
"""

from helpers.planted_defects import Defect, results_of

MADE = "g_layers_matrices.1: f64[flat_layers_matrices@ep] = coerce(g_layers_matrices) <axes=[dp], from=P, to=I>"
REDUCED = 'all_reduce_(gradients["layers.matrices"], dp)'
OF_EXPERTS = results_of("w_gate", "w_up", "w_down")


def test_row_12_experts_gradients_are_scaled_by_another_axis() -> None:
    """They were reduced over the ranks that hold other experts too (DeepSpeed PR #5259, Megatron PR #5956)."""
    defect = Defect(
        "experts",
        ir={MADE: MADE.replace("[dp]", "[dp, ep]")},
        text={REDUCED: REDUCED.replace("dp)", "dp_ep)")},
    )
    assert "coerce leads from P on ep, but its operand is S(flat_layers_matrices)" in defect.types()
    assert defect.values() >= OF_EXPERTS
    assert "nothing in the IR does `all_reduce_(gradients['layers.matrices'], dp_ep)`" in defect.emission()


def test_row_50_experts_gradients_are_as_many_times_too_large_as_there_are_ranks() -> None:
    """With AdamW nothing showed but the norm (pytorch#160285, PR #167178, torchtitan PR #1551)."""
    made = "d_w_down: f64[experts@ep, hidden, ffn]{dp: P} = grouped_contract(d_m, _g.3, held.2) <over=[batch, seq]>"
    defect = Defect(
        "experts",
        ir={
            made: made.replace("d_w_down:", "d_w_half:")
            + " !tiny.scale:15\n"
            + made.replace("d_w_down:", "d_w_other:")
            + " !tiny.scale:15\n"
            + made.partition("grouped")[0]
            + "add(d_w_half, d_w_other)"
        },
        text={REDUCED: f"{REDUCED}\n    {REDUCED}"},
    )
    assert defect.types() == ""
    assert defect.values() == results_of("w_down")
    assert "nothing in the IR does" in defect.emission()


def test_row_52_gates_have_a_gradient_of_one_ranks_experts() -> None:
    """Ranks with the same tokens know of their own experts alone (NeMo Automodel PR #1260, transformers#48687)."""
    summed = "d_gates.1: f64[batch@dp, seq, chosen] = coerce(d_gates) <axes=[tp], from=P, to=I>"
    defect = Defect(
        "experts of the same tokens",
        ir={summed: summed.replace("coerce(d_gates) <axes=[tp], from=P, to=I>", "zeros()")},
        text={"gates = replicate(gates, self.tp)": "gates = gates"},
    )
    assert defect.types() == ""
    assert defect.values() >= results_of("router")
    assert "emit: line" in defect.emission()


def test_row_55_a_routers_loss_is_shown_and_not_learned_from() -> None:
    """It was detached, or scaled by what has nothing to do with it (NeMo Automodel PR #1412, torchtitan PR #2061)."""
    one = "one: f64[] = one()"
    defect = Defect(
        "balanced",
        ir={one: "one: f64[] = zeros()"},
        text={"(loss_sum * inv_num_tokens + router_loss_sum).backward()": "(loss_sum * inv_num_tokens).backward()"},
    )
    assert defect.types() == ""
    assert defect.values() >= results_of("router")
    assert "router loss" not in defect.values()
    assert "nothing in the IR does" in defect.emission()


def test_row_56_a_balance_is_of_a_ranks_part_of_the_sequence() -> None:
    """Megatron PR #5996, #1617: under sequence parallelism each rank balanced its own part."""
    defect = Defect("balanced", text={", seq=0, over=self.cp)": ", seq=0)"})
    assert "nothing in the IR does `balance(" in defect.emission()


def test_row_60_logits_of_routers_are_made_in_few_bits() -> None:
    """They choose other experts (sglang#39351, AstrAI PR #57)."""
    defect = Defect(
        "experts in bf16", text={"linear(m.float(), self.router.float())": "linear(m, self.router).float()"}
    )
    assert "nothing in the IR does `linear(m, self.router)`" in defect.emission()


def test_row_61_a_capacity_is_of_a_ranks_tokens() -> None:
    """So what a model drops depends on the mesh (Tutel#173, #230)."""
    bounded = "limit_capacity(ids, 4, 6, seq=0, positions=self.positions, over=self.cp)"
    defect = Defect("bounded", text={bounded: "limit_capacity(ids, 4, 3, seq=0)"})
    assert "nothing in the IR does `limit_capacity(" in defect.emission()
