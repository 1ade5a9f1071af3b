"""A sequence over ranks: rows 31, 35 to 45, 49, 88 to 93 and 95."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from helpers.oracle import harness
from helpers.oracle.plans import Case
from helpers.planted_defects import CONTEXT, PARTS, TEXTS, Defect
from helpers.planted_runs import first_step, right_step, wrong_gradients
from helpers.programs import get_error_code
from helpers.small_plans import LLAMA, Plan
from scalec.runtime.ops import plain_attention
from scalec.runtime.ops import ring_attention as ring

ZIGZAG = 'zigzag=("cp",))'
LABELS = '"labels": Input(("seq", "batch"), {"seq": ("cp",), "batch": ("dp",)}, zigzag=("cp",))'


def test_row_31_layouts_of_a_sharded_sequence() -> None:
    """They were wrong without a causal mask or for odd lengths (pytorch#141429, EasyContext#47)."""
    assert (
        get_error_code(
            evolve(Plan(**CONTEXT), shard="batch over dp  seq over cp as zigzag", seq=6).text()
        )
        == "E0510"
    )
    assert Defect("gathered, full").values() == set()


def test_row_35_labels_are_cut_otherwise_than_tokens() -> None:
    """Labels were shifted after the cut, so that each part's last token had another's
    (transformers PR #36607).
    """
    defect = Defect("gathered", text={LABELS: LABELS.replace(', zigzag=("cp",)', "")})
    assert "labels" in defect.emission()
    planted = (
        "labels.9: i64[seq@cp, batch@dp] = exchanged(labels) <axes=[cp]> !tiny.scale:1\n   "
        " forward ()"
    )
    loss = "loss: f64[]{dp: P, cp: P} = cross_entropy(_logits, labels)"
    moved = Defect(
        "gathered",
        ir={"    forward ()": f"    {planted}", loss: loss.replace("labels)", "labels.9)")},
    )
    assert "loss" in moved.values()


def test_row_36_packed_documents_see_one_another() -> None:
    """As soon as the sequence was sharded (trl PR #6843)."""
    assert (
        "loss"
        in Defect(
            "packed", ir={"attention(q, k.1, v.1, documents)": "attention(q, k.1, v.1)"}
        ).values()
    )
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
    assert Defect(
        "exchanged", text={"all_to_all(q, self.cp, dim_from=1, dim_to=2)": "q"}
    ).emission()
    assert Defect(
        "ring", text={"ring_attention(q, k, v, self.cp, zigzag=True)": "attention(q, k, v)"}
    ).emission()


def test_row_39_rotary_tables_of_other_positions() -> None:
    """They were not cut, or not in the order in which ranks hold them (torchtitan PR #792,
    #1797, #1882).
    """
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
        "gathered",
        text={"all_gather(k, self.cp, dim=0, zigzag=True)": "all_gather(k, self.cp, dim=0)"},
    ).emission()
    assert Defect("ring", text={", zigzag=True)": ")"}).emission()


@pytest.mark.parametrize("plan", ["gathered, full", "ring, full"])
def test_row_41_balanced_chunks_are_taken_for_causal_ones(plan: str) -> None:
    """Half of the pairs were left out where nothing is masked (pytorch#141429)."""
    assert "loss" in Defect(plan, ir={'<mask="full"': '<mask="causal"'}).values()
    assert "nothing in the IR does" in Defect(plan, text={"causal=False, ": ""}).emission()


def test_row_42_parts_of_a_ring_are_rounded_at_each_hop() -> None:
    """To bfloat16, as what goes around was (TransformerEngine PR #716, #821;
    ring-flash-attention#22): eight hops are further off than twice one call.  Here the runtime's
    merge, of the keys of each."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 16, generator=draw).bfloat16().float() for _ in range(3))
    how = plain_attention.Setting(1, 0.25, -1, -1, 0.0)
    exact, _ = plain_attention.forward(q.double(), k.double(), v.double(), None, None, how)
    once = (exact.bfloat16() - exact).abs().max()

    def off(rounds: bool) -> float:
        out, lse = torch.zeros_like(q), q.new_full((1, 2, 64), -torch.inf)
        for keys, values in zip(k.split(8, 1), v.split(8, 1), strict=True):
            ring._merge(out, lse, *plain_attention.forward(q, keys, values, None, None, how), 1)
            out = out.bfloat16().float() if rounds else out
        return float((out.bfloat16() - exact).abs().max() / once)

    assert off(rounds=False) < 1.01
    assert off(rounds=True) > 2


def test_row_43_the_loss_counts_the_axis_of_the_sequence() -> None:
    """Divided by a rank's own count, or by the axis once more (Megatron#673, #906; transformers
    PR #48167).
    """
    count = "= coerce(num_tokens) <axes=[dp, cp], from=P, to=I>"
    assert Defect("gathered", ir={count: count.replace("dp, cp", "dp")}).types()
    text = "num_tokens = all_reduce_(count_valid(batch.labels), dp_cp)"
    assert Defect("gathered", text={text: text.replace("dp_cp", 'mesh.axis("dp")')}).emission()


def test_row_44_heads_that_lose_their_ratio() -> None:
    """Padded heads, or heads that do not divide (long-context-attention#53, vllm-omni PR #5716)."""
    assert get_error_code(TEXTS["exchanged"].replace("cp = 2", "cp = 8")) == "E0510"


def test_row_45_copies_of_keys_whose_gradients_are_not_summed() -> None:
    """Of key/value heads fewer than ranks (InternEvo PR #224, prime-rl PR #3042)."""
    scatter = "from=P, to=S(seq)>"
    assert Defect("gathered", ir={scatter: "from=R, to=S(seq)>"}).types()
    text = "all_gather(k, self.cp, dim=0, zigzag=True)"
    assert Defect(
        "gathered", text={text: text.replace("all_gather", "all_gather_invariant")}
    ).emission()


def test_row_49_gradients_are_not_reduced_over_the_sequence() -> None:
    """Those of norms, with tensor and context parallelism together (Megatron#1528, #1446)."""
    reduced = "coerce(g_params) <axes=[dp, cp], from=P, to=I>"
    assert Defect("gathered", ir={reduced: reduced.replace("dp, cp", "dp")}).types()
    text = 'all_reduce_(gradients["params"], dp_cp)'
    assert Defect("gathered", text={text: text.replace("dp_cp", 'mesh.axis("dp")')}).emission()


def test_row_88_backward_of_a_ring_has_the_keys_of_its_first_hop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is right (diffusers#14265, #14274; TransformerEngine#1557), gradients are not."""
    case = Case(cp=2, how="as zigzag via ring")
    backward, around = ring._Ring.backward, ring._Ring._around

    def of_first(self: Any, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in around(self, k, v):
            yield k, v

    def wrong_backward(self: Any, *given: Any) -> tuple[Tensor, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring._Ring, "_around", of_first)
            return backward(self, *given)

    monkeypatch.setattr(ring._Ring, "backward", wrong_backward)
    got, right = first_step(case, harness.load_case(case, tmp_path)), right_step(case)
    assert got.loss == pytest.approx(right.loss, rel=1e-12)
    assert {"layers.1.wq", "layers.1.wk", "layers.1.wv"} <= wrong_gradients(got, right)
    assert not {"head", "norm", "layers.1.w_up"} & wrong_gradients(got, right)


def test_row_89_keys_are_gathered_along_another_dim() -> None:
    """Or a dim was annotated as sharded that is not (torchtitan#3206, #3681)."""
    gather = "coerce(k) <axes=[cp], from=S(seq), to=R>"
    text = "all_gather(k, self.cp, dim=0, zigzag=True)"
    defect = Defect(
        "gathered",
        ir={gather: gather.replace("S(seq)", "S(kv_heads)")},
        text={text: text.replace("dim=0, zigzag=True", "dim=2")},
    )
    assert "coerce leads from S(kv_heads) on cp, but its operand is S(seq)" in defect.types()
    assert "nothing in the IR does `all_gather(k, self.cp, dim=2)`" in defect.emission()


def test_row_90_documents_are_those_of_other_sequences() -> None:
    """Numbers of documents or weights of samples were not cut as their tokens were (prime-rl#2392,
    #2359; ms-swift#10035)."""
    attends = "attention(q, k.1, v.1, documents)"
    others = "documents.9: i64[seq, batch@dp] = shifted(documents) <axes=[dp]>"
    made = "_o: f64[seq@cp, batch@dp, heads, head_dim] = "
    layout = '"documents": Input(("seq", "batch"), {"batch": ("dp",)})'
    defect = Defect(
        "packed",
        ir={
            made
            + attends: f"{others} !tiny.scale:10 {made}{attends.replace('documents', 'documents.9')}"
        },
        text={layout: layout.replace('{"batch": ("dp",)}', "{}")},
    )
    assert "loss" in defect.values()
    assert "`inputs` is" in defect.emission()


def test_row_91_the_last_label_of_each_part_counts_nothing() -> None:
    """The token that would predict the next part's first was masked, "an error of almost 0%"
    (LlamaFactory#10474).
    """
    count, loss = (
        "count_valid(batch.labels)",
        "loss: f64[]{dp: P, cp: P} = cross_entropy(_logits, labels)",
    )
    lost = "labels.9: i64[seq@cp, batch@dp] = last_ignored(labels)"
    defect = Defect(
        "gathered",
        ir={loss: f"{lost} !tiny.scale:1 {loss.replace('labels)', 'labels.9)')}"},
        text={count: "count_valid(batch.labels[:, :-1])"},
    )
    assert defect.values() == {"loss"}
    assert "is no part of a program" in defect.emission()


def test_row_92_tokens_are_counted_by_each_rank_of_the_sequence() -> None:
    """The schedule of the learning rate and the epochs followed that count (torchtitan#2990,
    #3257).
    """
    shown = "  yield last loss.3, last grad_norm, last num_tokens.1,"
    more = "  num_tokens.9: i64[] = add(num_tokens.1, num_tokens.1) !tiny.scale:1"
    defect = Defect(
        "gathered",
        ir={shown: more + shown.replace("num_tokens.1", "num_tokens.9")},
        text={"tokens=num_tokens)": "tokens=num_tokens * 2)"},
    )
    assert defect.values() == {"count"}
    assert "nothing in the IR does `num_tokens * 2`" in defect.emission()


def test_row_93_a_window_is_lost_where_heads_are_exchanged() -> None:
    """(TransformerEngine PR #3527.)"""
    window = {'<mask="causal", window=3.0': '<mask="causal"'}
    defect = Defect("windows, exchanged", ir=window, text={", window=3": ""})
    assert defect.types() == ""
    assert "loss" in defect.values()
    assert "nothing in the IR does `attention(q, k, v)`" in defect.emission()


def test_row_95_tokens_are_shifted_within_a_ranks_part() -> None:
    """Convolutions lacked the tokens before their part, or had those of the rank before
    (Megatron#6550, #5917).
    """
    body = LLAMA.replace("x = x + (silu", "x = x + roll(m, by=1, over=seq) + (silu")
    assert get_error_code(Plan(**CONTEXT, shard=PARTS, body=body).text()) == "E0224"
    assert (
        get_error_code(Plan(**CONTEXT, shard=PARTS, body=body, word="bidirectional").text())
        == "E0601"
    )


@pytest.mark.long
def test_right_plans_are_right() -> None:
    for plan in (
        "gathered",
        "ring",
        "exchanged",
        "windows",
        "windows of a ring",
        "windows, exchanged",
        "ring, full",
        "packed",
    ):
        assert Defect(plan).values() == set(), plan
