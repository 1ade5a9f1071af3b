"""A sequence over ranks: rows 31, 35 to 45 and 49."""

import pytest
from attrs import evolve

from helpers.planted_defects import CONTEXT, TEXTS, Defect, refusal
from helpers.small_plans import Plan

ZIGZAG = 'zigzag=("cp",))'
LABELS = '"labels": Input(("seq", "batch"), {"seq": ("cp",), "batch": ("dp",)}, zigzag=("cp",))'


def test_row_31_layouts_of_a_sharded_sequence() -> None:
    """They were wrong without a causal mask or for odd lengths (pytorch#141429, EasyContext#47)."""
    assert refusal(evolve(Plan(**CONTEXT), shard="batch over dp  seq over cp as zigzag", seq=6).text()) == "E0510"
    assert Defect("gathered, full").values() == set()


def test_row_35_labels_are_cut_otherwise_than_tokens() -> None:
    """Labels were shifted after the cut, so that each part's last token had another's (transformers PR #36607)."""
    defect = Defect("gathered", text={LABELS: LABELS.replace(', zigzag=("cp",)', "")})
    assert "labels" in defect.emission()
    planted = "labels.9: i64[seq@cp, batch@dp] = exchanged(labels) <axes=[cp]> !tiny.scale:1\n    forward ()"
    loss = "loss: f64[]{dp: P, cp: P} = cross_entropy(_logits, labels)"
    moved = Defect("gathered", ir={"    forward ()": f"    {planted}", loss: loss.replace("labels)", "labels.9)")})
    assert "loss" in moved.values()


def test_row_36_packed_documents_see_one_another() -> None:
    """As soon as the sequence was sharded (trl PR #6843)."""
    assert "loss" in Defect("packed", ir={"attention(q, k.1, v.1, documents)": "attention(q, k.1, v.1)"}).values()
    assert Defect("packed", text={", documents=documents": ""}).emission()


@pytest.mark.parametrize("plan", ["windows", "windows of a ring"])
def test_row_37_windows_are_lost(plan: str) -> None:
    """Windowed layers ran full causal (accelerate PR #4177, TransformerEngine PR #3527)."""
    assert "loss" in Defect(plan, ir={'<mask="causal", window=3.0': '<mask="causal"'}).values()
    assert Defect(plan, text={", window=3": ""}).emission()


def test_row_38_an_exchange_over_another_group() -> None:
    """Or a path that never exchanges (TensorRT-LLM PR #13821, sglang PR #33353)."""
    exchange = "<axes=[cp], from=S(seq), to=S(heads)>"
    assert Defect("exchanged", ir={exchange: exchange.replace("cp", "dp")}).types()
    assert Defect("exchanged", text={"all_to_all(q, self.cp, dim_from=1, dim_to=2)": "q"}).emission()
    assert Defect("ring", text={"ring_attention(q, k, v, self.cp, zigzag=True)": "attention(q, k, v)"}).emission()


def test_row_39_rotary_tables_of_other_positions() -> None:
    """They were not cut, or not in the order in which ranks hold them (torchtitan PR #792, #1797, #1882)."""
    for wrong in (
        {", positions=positions": ""},
        {f'positions = Positions(mesh, SEQ, "cp", {ZIGZAG}': "positions = None"},
    ):
        assert Defect("gathered", text=wrong).emission()
    of_parts = {"rope(_y) <theta=10000.0>": 'in_rank_order(_y) <theta=10000.0, op="rope">'}
    assert "loss" in Defect("gathered", ir=of_parts).values()


def test_row_40_chunks_are_put_together_in_another_order() -> None:
    """(pytorch#152261, EasyContext#47, pytorch PR #183968.)"""
    gather = "coerce(k) <axes=[cp], from=S(seq), to=R>"
    in_order = gather.replace("coerce(k) <", 'in_rank_order(k) <op="coerce", ')
    assert "loss" in Defect("gathered", ir={gather: in_order}).values()
    assert Defect(
        "gathered", text={"all_gather(k, self.cp, dim=0, zigzag=True)": "all_gather(k, self.cp, dim=0)"}
    ).emission()
    assert Defect("ring", text={", zigzag=True)": ")"}).emission()


def test_row_43_the_loss_counts_the_axis_of_the_sequence() -> None:
    """Divided by a rank's own count, or by the axis once more (Megatron#673, #906; transformers PR #48167)."""
    count = "= coerce(num_tokens) <axes=[dp, cp], from=P, to=I>"
    assert Defect("gathered", ir={count: count.replace("dp, cp", "dp")}).types()
    text = "num_tokens = all_reduce_(count_valid(batch.labels), dp_cp)"
    assert Defect("gathered", text={text: text.replace("dp_cp", 'mesh.axis("dp")')}).emission()


def test_row_44_heads_that_lose_their_ratio() -> None:
    """Padded heads, or heads that do not divide (long-context-attention#53, vllm-omni PR #5716)."""
    assert refusal(TEXTS["exchanged"].replace("cp = 2", "cp = 8")) == "E0510"


def test_row_45_copies_of_keys_whose_gradients_are_not_summed() -> None:
    """Of key/value heads fewer than ranks (InternEvo PR #224, prime-rl PR #3042)."""
    scatter = "from=P, to=S(seq)>"
    assert Defect("gathered", ir={scatter: "from=R, to=S(seq)>"}).types()
    text = "all_gather(k, self.cp, dim=0, zigzag=True)"
    assert Defect("gathered", text={text: text.replace("all_gather", "all_gather_invariant")}).emission()


def test_row_49_gradients_are_not_reduced_over_the_sequence() -> None:
    """Those of norms, with tensor and context parallelism together (Megatron#1528, #1446)."""
    reduced = "coerce(g_params) <axes=[dp, cp], from=P, to=I>"
    assert Defect("gathered", ir={reduced: reduced.replace("dp, cp", "dp")}).types()
    text = 'all_reduce_(gradients["params"], dp_cp)'
    assert Defect("gathered", text={text: text.replace("dp_cp", 'mesh.axis("dp")')}).emission()


def test_right_plans_are_right() -> None:
    for plan in ("gathered", "ring", "exchanged", "windows", "windows of a ring", "packed"):
        assert Defect(plan).values() == set(), plan
