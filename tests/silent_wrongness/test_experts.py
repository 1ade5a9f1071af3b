"""Mixtures of experts whose step is another than the model's: rows 12, 50 to 77, 80 and 86, in the
IR and in the text.

Rows of what runs are in `test_routes`; others need a feature that is not there (`test_rows`).
"""

import pytest

from helpers.planted_defects import TEXTS, Defect, parameters, results_of
from helpers.programs import get_error_code
from scalec.compiler.analysis.memory import account
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

MADE = (
    "g_layers_matrices.1: f64[flat_layers_matrices@ep] = coerce(g_layers_matrices) <axes=[dp],"
    " from=P, to=I>"
)
REDUCED = 'all_reduce_(gradients["layers.matrices"], dp)'
OF_EXPERTS = results_of("w_gate", "w_up", "w_down")


def test_row_12_experts_gradients_are_scaled_by_another_axis() -> None:
    """They were reduced over the ranks that hold other experts too (DeepSpeed PR #5259,
    Megatron PR #5956).
    """
    defect = Defect(
        "experts",
        ir={MADE: MADE.replace("[dp]", "[dp, ep]")},
        text={REDUCED: REDUCED.replace("dp)", "dp_ep)")},
    )
    assert "coerce leads from P on ep, but its operand is S(flat_layers_matrices)" in defect.types()
    assert defect.values() >= OF_EXPERTS
    assert (
        "nothing in the IR does `all_reduce_(gradients['layers.matrices'], dp_ep)`"
        in defect.emission()
    )


def test_row_50_experts_gradients_are_as_many_times_too_large_as_there_are_ranks() -> None:
    """With AdamW nothing showed but the norm (pytorch#160285, PR #167178, torchtitan PR #1551)."""
    made = (
        "d_w_down: f64[experts@ep, hidden, ffn]{dp: P} = grouped_contract(d_m, _g.3, rows_per_expert.2)"
        " <over=[batch, seq]>"
    )
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


NORMS_OF_EXPERTS = "grad_norm(grad_norm_sq, grad_norm_sq.2)"
ADDED = 'all_reduce_(sum_squares(gradients["layers.matrices"]), ep)'


@pytest.mark.parametrize(
    ("squares", "text"),
    [
        ("grad_norm_sq", ""),
        (
            "grad_norm_sq, grad_norm_sq.1",
            " + " + ADDED.removeprefix("all_reduce_(").removesuffix(", ep)"),
        ),
        ("grad_norm_sq, grad_norm_sq.2, grad_norm_sq.2", f" + {ADDED} + {ADDED}"),
    ],
    ids=["not", "those of its rank", "twice"],
)
def test_row_51_the_norm_counts_experts(squares: str, text: str) -> None:
    """Not at all, not those of other ranks, or twice (DeepSpeed PR #8478, Megatron PR #5916,
    ColossalAI#2192).
    """
    defect = Defect(
        "experts",
        ir={NORMS_OF_EXPERTS: f"grad_norm({squares})"},
        text={f" + {ADDED}": text},
    )
    assert ("is not linear in what is partial on ep" in defect.types()) == (
        "grad_norm_sq.1" in squares
    )
    assert defect.values() == {"norm"}
    assert "nothing in the IR does" in defect.emission()


def test_row_52_gates_have_a_gradient_of_one_ranks_experts() -> None:
    """Ranks with the same tokens know of their own experts alone (NeMo Automodel PR #1260,
    transformers#48687).
    """
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
    """It was detached, or scaled by what has nothing to do with it (NeMo Automodel PR #1412,
    torchtitan PR #2061).
    """
    one = "one: f64[] = one()"
    defect = Defect(
        "balanced",
        ir={one: "one: f64[] = zeros()"},
        text={
            "(loss_sum * inv_num_tokens + router_loss_sum).backward()": (
                "(loss_sum * inv_num_tokens).backward()"
            )
        },
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
        "experts in bf16",
        text={"linear(m.float(), self.router.float())": "linear(m, self.router).float()"},
    )
    assert "nothing in the IR does `linear(m, self.router)`" in defect.emission()


def test_row_61_a_capacity_is_of_a_ranks_tokens() -> None:
    """So what a model drops depends on the mesh (Tutel#173, #230)."""
    bounded = "limit_capacity(ids, EXPERTS, 6, seq=0, positions=self.positions, over=self.cp)"
    defect = Defect("bounded", text={bounded: "limit_capacity(ids, EXPERTS, 3, seq=0)"})
    assert "nothing in the IR does `limit_capacity(" in defect.emission()


def test_row_62_a_part_is_taken_by_the_place_on_another_axis() -> None:
    """It was right where both axes had two ranks (torchtitan PR #2842)."""
    own = 'sort_by_expert(ids) <to="experts", own=[tp]>'
    defect = Defect(
        "experts of the same tokens",
        ir={own: own.replace("[tp]", "[dp]")},
        text={'Experts(mesh, EXPERTS, "tp")': 'Experts(mesh, EXPERTS, "dp")'},
    )
    assert (
        "sort_by_expert picks experts over axes on which all ranks have the same tokens"
        in defect.types()
    )
    assert "which does sort_by_expert(top_k" in defect.emission()


COUNTED = (
    "rows_per_expert: i64[experts@ep, batch@dp, seq, chosen] = exchange_counts(order)"
    ' <to=["ep:experts"]>'
)


def test_row_63_rows_are_exchanged_by_the_counts_of_another_rank() -> None:
    """A factor of another group was in one dispatcher's sizes (Megatron#1575)."""
    made, _, _ = COUNTED.partition("exchange_counts")
    counted = COUNTED.replace("rows_per_expert:", "rows_per_expert.9:")
    others = f"{counted} !tiny.scale:15 {made}shifted(rows_per_expert.9) <axes=[ep]>"
    defect = Defect(
        "experts",
        ir={COUNTED: others},
        text={
            "exchange(dispatch(m, order), rows_per_expert, ": "exchange(dispatch(m, order), order, "
        },
    )
    assert {"loss", "gradient of wte"} | OF_EXPERTS <= defect.values()
    assert (
        "nothing in the IR does `exchange(dispatch(m, order), order, async_op=True)`"
        in defect.emission()
    )


def test_row_64_rows_are_accounted_for_as_if_ranks_shared_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Divided by the ranks of experts, though each brings its own tokens (Megatron PR #6782): what
    `combine` reads of 4 tokens with 2 experts each and 4 numbers of 8 bytes, in 2 layers."""

    def read_by_combine() -> int:
        program = compile_plan(Source("tiny.scale", TEXTS["experts"]))
        return sum(kept.total for kept in account(program).kept if kept.op.kind == "combine")

    assert read_by_combine() == 4 * 2 * 4 * 8 * 2
    rows = Program._rows
    monkeypatch.setattr(
        Program, "_rows", lambda self, type: rows(self, type) // self.axis("ep").size
    )
    assert read_by_combine() != 4 * 2 * 4 * 8 * 2


def test_row_67_a_balance_is_of_a_ranks_microbatch() -> None:
    """Another loss on each mesh: a plan can ask for a sequence's alone, which no mesh changes
    (Megatron#1406).
    """
    assert (
        get_error_code(TEXTS["balanced"].replace("balance=0.5", "balance=0.5, over=batch"))
        == "E0606"
    )
    assert Defect("balanced").values() == set()


def test_row_69_each_rank_of_experts_clips_by_the_norm_of_its_own() -> None:
    """So copies of what is not an expert part (Automodel#3816)."""
    scale = "scale: f64[] = clip_scale(grad_norm) <max=0.1>"
    own = (
        f"own: f64[]{{ep: P}} = grad_norm(grad_norm_sq.1) !tiny.scale:1"
        f" {scale.replace('(grad_norm)', '(own)')}"
    )
    clipped = 'clip_scale(sum_squares(gradients["layers.matrices"]).sqrt(), 0.1)'
    defect = Defect(
        "experts, clipped", ir={scale: own}, text={"clip_scale(grad_norm, 0.1)": clipped}
    )
    assert "is not linear in what is partial on ep" in defect.types()
    assert defect.values() == {f"updated {name}" for name in parameters("experts, clipped")}
    assert "nothing in the IR does" in defect.emission()


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("router_z(_logits)", {"router loss"}),
        ('vjp(one.2, _logits.3) <of="router_z", wrt=[logits], ', results_of("router")),
    ],
    ids=["loss", "gradient"],
)
def test_row_70_a_z_loss_is_scaled_by_the_ranks(op: str, wrong: set[str]) -> None:
    """As shown, or as learned from (Megatron#3199)."""
    made = f"{op} <by=0.00390625>" if "vjp" not in op else f"{op}by=0.00390625>"
    defect = Defect(
        "small logits",
        ir={made: made.replace("0.00390625", "0.0078125")},
        text={"by=0.25 / 64)": "by=0.25 / 32)"},
    )
    assert defect.types() == ""
    assert defect.values() >= wrong
    assert ("router loss" in defect.values()) == ("vjp" not in op)
    assert "nothing in the IR does `router_z(logits, by=0.25 / 32)`" in defect.emission()


def test_row_71_a_count_is_reduced_twice() -> None:
    """In place, by the router and by what reads it (Megatron#7452, finding 10)."""
    count = "num_tokens.1: i64[] = coerce(num_tokens) <axes=[dp, ep], from=P, to=I>"
    text = "all_reduce_(count_valid(batch.labels), dp_ep)"
    first = count.replace(".1:", ".9:")
    defect = Defect(
        "experts",
        ir={
            count: f"{first} !tiny.scale:1"
            f" {count.replace('coerce(num_tokens)', 'coerce(num_tokens.9)')}"
        },
        text={text: f"all_reduce_({text}, dp_ep)"},
    )
    assert "coerce leads from P on dp, but its operand is I" in defect.types()
    assert {"count", "norm"} | OF_EXPERTS <= defect.values()
    assert "nothing in the IR does `all_reduce_(all_reduce_(" in defect.emission()


def test_row_72_gates_are_combined_without_a_gradient() -> None:
    """A path of its own lost that of scores (DeepSpeed#8213).

    Every type fits, and the loss is right.
    """
    slope = "d__logits.1: f64[batch@dp*ep, seq, scored] = vjp(d_gates,"
    none = "d_gates.9: f64[batch@dp*ep, seq, chosen] = zeros() !tiny.scale:14"
    defect = Defect(
        "experts",
        ir={slope: f"{none} {slope.replace('d_gates', 'd_gates.9')}"},
        text={", gates, order)": ", gates.detach(), order)"},
    )
    assert defect.types() == ""
    assert results_of("router") <= defect.values()
    assert "loss" not in defect.values()
    assert "nothing in the IR does `gates.detach()`" in defect.emission()


def test_row_73_the_gradient_of_tokens_is_of_one_ranks_experts() -> None:
    """What comes before experts lost the reduction of its gradient (torchtitan#4054)."""
    summed = "d_m.3: f64[batch@dp, seq, hidden] = coerce(d_m.2) <axes=[tp], from=P, to=I>"
    kept = 'd_m.3: f64[batch@dp, seq, hidden]{tp: P} = cast(d_m.2) <dtype="f64">'
    defect = Defect(
        "experts of the same tokens",
        ir={summed: kept},
        text={"        m = replicate(m, self.tp)": "        m = m"},
    )
    assert "add is not linear in what is partial on tp" in defect.types()
    assert results_of("norm2", "wo", "wte") <= defect.values()
    assert "loss" not in defect.values()
    assert "nothing in the IR does `dispatch(m, order)`" in defect.emission()


def test_row_74_rows_are_combined_in_the_order_of_another_rank() -> None:
    """Indices were wrong under sequence parallelism (torchtitan#3604, #3664)."""
    made = "m.2: f64[batch@dp*ep, seq, hidden] = combine(_rows, gates, order)"
    others = "order.9: i64[experts, batch@dp*ep, seq, chosen] = shifted(order) <axes=[ep]>"
    defect = Defect(
        "experts",
        ir={made: f"{others} !tiny.scale:14 {made.replace('order)', 'order.9)')}"},
        text={"gates, order)": "gates, rows_per_expert)"},
    )
    assert {"loss"} | OF_EXPERTS <= defect.values()
    assert "nothing in the IR does `combine(" in defect.emission()


def test_row_75_gates_weigh_the_rows_of_other_choices() -> None:
    """Dispatchers did not agree on the order of scores (Megatron#1603).

    `test_routes` has it in the runtime.
    """
    defect = Defect("experts", text={", gates, order)": ", gates.flip(-1), order)"})
    assert "nothing in the IR does `gates.flip(-1)`" in defect.emission()


def test_row_77_ranks_without_an_expert() -> None:
    """Their empty shards crashed, or hung (transformers#48237)."""
    assert get_error_code(TEXTS["experts"].replace("experts = 4", "experts = 3")) == "E0510"
    plan = (
        TEXTS["experts"].replace("ep = 2", "ep = 8").replace("batch over dp, ep", "batch over dp")
    )
    assert get_error_code(plan) == "E0510"


def test_row_80_gates_of_heads_are_cut_by_fewer_ranks_than_heads() -> None:
    """With fewer key/value heads than ranks (Megatron#3575)."""
    made = "_y.2: f64[seq, batch, heads@tp_0*tp_1, head_dim] = contract(a.1, wg.2)"
    weight = 'self.wg = weight(mesh, HEADS * HEAD_DIM, HIDDEN, shard={0: ("tp_0", "tp_1")}'
    defect = Defect(
        "gated heads",
        ir={made: made.replace("heads@tp_0*tp_1", "heads@tp_0")},
        text={weight: weight.replace('("tp_0", "tp_1")', '"tp_0"')},
    )
    assert "_y.2 is " in defect.types()
    assert defect.emission()
    product = "_g: f64[seq, batch, heads@tp_0*tp_1, head_dim] = mul(_o, g)"
    others = product.replace("_g:", "g.9:").replace("mul(_o, g)", "shifted(g) <axes=[tp_1]>")
    moved = Defect(
        "gated heads", ir={product: f"{others} !tiny.scale:11 {product.replace(', g)', ', g.9)')}"}
    )
    assert {"loss", "gradient of wg", "gradient of wo"} <= moved.values()


def test_row_86_every_rank_adds_the_shared_expert() -> None:
    """To a sum that is still to be done: counted once by each rank, as a bias after a
    row-parallel product would be.
    """
    summed = "m.4: f64[batch@dp, seq, hidden] = coerce(m.2) <axes=[tp], from=P, to=I>"
    early = "m.9: f64[batch@dp, seq, hidden]{tp: P} = add(m.2, _y.7)"
    defect = Defect(
        "a shared expert",
        ir={
            summed: f"{early} !tiny.scale:18 {summed.replace('m.2)', 'm.9)')}",
            "add(x.2, m.4, _y.7)": "add(x.2, m.4)",
        },
        text={"all_reduce(m_2, self.tp)": "all_reduce(m_2 + y, self.tp)"},
    )
    assert "add is not linear in what is partial on tp; its operands are P, I" in defect.types()
    assert {"loss", "gradient of s_up", "gradient of s_down"} <= defect.values()
    assert "nothing in the IR does" in defect.emission()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "plan",
    [
        "experts",
        "experts, clipped",
        "experts of the same tokens",
        "a shared expert",
        "small logits",
        "gated heads",
    ],
)
def test_plans_of_experts_are_right(plan: str) -> None:
    assert Defect(plan).values() == set()
    assert Defect(plan).types() == ""
