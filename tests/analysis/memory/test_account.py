"""The account of a plan small enough to be counted by hand, how it is shown, and whether a plan
fits.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.programs import make_program
from scalec.compiler import cli
from scalec.compiler.analysis.memory import Account, account
from scalec.compiler.analysis.memory.aliasing import Storages
from scalec.compiler.analysis.memory.in_flight import Passing
from scalec.compiler.emit import emit
from scalec.compiler.ir import Op, Program, Region
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.reports.explain import memory
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[3] / "plans"

# A rank has 2 of the 4 sequences of a microbatch, 10 tokens each, and 3 of the 6 columns: 20
# tokens, 80 numbers of x.
PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 6  hidden = 4  ffn = 8  layers = 5 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + silu(x @ up[hidden -> ffn]) @ down[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
cluster { gpu = h100_sxm }
mesh { dp = 2  tp = 2 }
shard {
  batch over dp
  vocab over tp
}
train {
  seq = 10  global_batch = 12  microbatch = 2  steps = 1  precision = bf16  kernels = torch
  optimizer adamw { lr = 0.1 }
  data text { files = ["a"] }
}
"""
X = 20 * 4 * 2


def shared(state: str, text: str = PLAN, layers: int = 5, hidden: int = 4, ffn: int = 8) -> Program:
    """The plan with a section `state`, and of other sizes."""
    text = text.replace("layers = 5", f"layers = {layers}").replace(
        "hidden = 4", f"hidden = {hidden}"
    )
    return make_program(
        text.replace("ffn = 8", f"ffn = {ffn}").replace("mesh ", f"state {{ {state} }}\nmesh ")
    )


def layers(count: int) -> Account:
    return account(make_program(PLAN.replace("layers = 5", f"layers = {count}")))


def get_kept_values(it: Account) -> list[tuple[str, str, int, int]]:
    return [(each.op.kind, each.what, each.bytes, each.layers) for each in it.kept]


def test_state() -> None:
    """Each parameter in bf16, and in float32 its master, its gradient and two averages."""
    it = account(make_program(PLAN))
    elements = 2 * 3 * 4 + 5 * 2 * 4 * 8
    assert sum(bucket.parameters for bucket in it.buckets) == 2 * elements
    assert it.state == (2 + 4 + 4 + 8) * elements + 4 + 8
    assert it.inputs == 2 * 3 * 20 * 8


@pytest.mark.parametrize(
    ("state", "parameters", "gradients"),
    [
        ("zero 1 over dp", 24 + 5 * 64, 24 + 5 * 64),
        ("zero 2 over dp", 24 + 5 * 64, 24 + 5 * 32),
        ("zero 3 over dp", 24 + 5 * 32, 24 + 5 * 32),
        ("parameters, optimizer over dp", 24 + 5 * 32, 24 + 5 * 64),
    ],
)
def test_shared_state(state: str, parameters: int, gradients: int) -> None:
    """Half of 64 elements of a layer, and of the 24 elsewhere, whose gradients and working
    copies are whole.
    """
    it, single = account(shared(state)), account(shared(state, PLAN.replace("bf16", "fp32")))
    assert [
        sum(getattr(b, what) for b in it.buckets) for what in ("parameters", "masters", "gradients")
    ] == [
        2 * parameters,
        4 * (12 + 5 * 32),
        4 * gradients,
    ]
    assert sum(b.optimizer for b in it.buckets) == 8 * (12 + 5 * 32)
    assert [
        sum(getattr(b, what) for b in single.buckets) for what in ("parameters", "masters")
    ] == [4 * parameters, 0]


def test_padding() -> None:
    """Three ranks' parts of a layer's 64 elements, in rows of 4 and 8, are of 24: of 72
    elements 8 are padding.
    """
    compiled = shared("zero 1 over dp  bucket = 300B", PLAN.replace("dp = 2", "dp = 3"))
    assert account(compiled).padding == 5 * 8 * (2 + 4) + 5 * 8 * (4 + 8) // 3
    assert "of tensors: 400 B, " in memory(compiled)
    assert account(make_program(PLAN)).padding == 0
    assert "padding" not in memory(make_program(PLAN))


@pytest.mark.parametrize(
    ("settings", "bytes_each", "scalars"),
    [("precision = fp16", 2 + 4 + 4 + 8, 20), ("precision = bf16  master = bf16", 2 + 2 + 4, 12)],
)
def test_state_in_other_element_types(settings: str, bytes_each: int, scalars: int) -> None:
    """Counts of steps take 4 and 8 bytes, a loss scale 8; without masters the model's own
    weights are updated.
    """
    it = account(make_program(PLAN.replace("precision = bf16", settings)))
    assert it.state == bytes_each * (2 * 3 * 4 + 5 * 2 * 4 * 8) + scalars


def test_a_gradient_is_there_twice_while_it_is_reduced_in_another_element_type() -> None:
    """Of few tokens nothing else takes as much."""
    few = PLAN.replace("hidden = 4  ffn = 8", "hidden = 400  ffn = 800").replace(
        "seq = 10", "seq = 1"
    )
    assert account(make_program(few)).peak.op is not None
    it = account(make_program(few.replace("precision = bf16", "precision = bf16  reduce = bf16")))
    assert (it.peak.op, it.peak.other) == (
        None,
        max(bucket.gradients for bucket in it.buckets) // 2,
    )


def test_what_forward_keeps() -> None:
    assert get_kept_values(account(make_program(PLAN))) == [
        ("embedding", "rows", 20 * 8, 1),
        ("embedding", "rows elsewhere", 20, 1),
        ("contract", "x.4", X, 1),
        ("silu", "_y", 2 * X, 5),
        ("contract", "_g", 2 * X, 5),
        ("contract", "x.2", X, 4),
        ("contract", "x.3", X, 1),
        ("local_softmax_stats", "_logits", 20 * 3 * 2, 1),
        ("local_softmax_stats", "logits_max.1", 20 * 4, 1),
        ("local_softmax_stats", "label", 20 * 8, 1),
        ("local_softmax_stats", "label elsewhere", 20, 1),
        ("token_loss", "sum_exp.1", 20 * 4, 1),
        ("token_loss", "no label", 20, 1),
    ]


def test_what_forward_keeps_of_a_head_in_parts() -> None:
    """No logits; what a rank needs to bring its parts to the largest logit of all."""
    it = account(make_program(PLAN.replace("kernels = torch", "kernels = triton  logits = chunk")))
    assert get_kept_values(it)[-5:] == [
        ("linear_softmax_stats", "x.3", X, 1),
        ("linear_softmax_stats", "logits_max", 20 * 4, 1),
        ("rescale_to_global_max", "exp(m - peak)", 20 * 4, 1),
        ("token_loss", "sum_exp.1", 20 * 4, 1),
        ("token_loss", "no label", 20, 1),
    ]


def test_a_head_with_the_whole_vocabulary_keeps_its_gradients() -> None:
    """Made with the loss of 1024 tokens at a time; backward scales them, and makes nothing."""
    text = PLAN.replace("kernels = torch", "kernels = triton").replace(
        "  vocab over tp\n", "  ffn over tp\n"
    )
    long = text.replace("seq = 10", "seq = 4096").replace("vocab = 6", "vocab = 6000")
    it = account(make_program(long))
    x, weight, logits = 2 * 4096 * 4 * 2, 6000 * 4 * 2, 1024 * 6000 * 2
    assert ("linear_cross_entropy", "gradient", x, 1) in get_kept_values(it)
    assert ("linear_cross_entropy", "gradient of the weight", weight, 1) in get_kept_values(it)
    assert (it.peak.where, it.peak.name) == ("forward", "head")
    assert it.peak.other == logits + x + 4
    assert it.peak.kept == it.activations


ATTENDED = """model near(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 6  hidden = 4  heads = 2  head_dim = DIM  layers = 1 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    q = x @ wq[hidden -> heads, head_dim]
    k = x @ wk[hidden -> heads, head_dim]
    v = x @ wv[hidden -> heads, head_dim]
    x = x + attention(q, k, v, mask=causal, window=700) @ wo[heads, head_dim -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
cluster { gpu = h100_sxm }
train {
  seq = 1024  global_batch = 1  microbatch = 1  steps = 1  precision = TYPE  kernels = triton
  optimizer adamw { lr = 0.1 }
  data text { files = ["a"] }
}
"""


@pytest.mark.parametrize(
    ("dim", "dtype", "has"),
    [(64, "bf16", True), (80, "bf16", False), (64, "fp32", True), (256, "fp32", False)],
)
def test_where_attention_has_no_blocks_some_scores_are_in_memory(
    dim: int, dtype: str, has: bool
) -> None:
    """Those of 256 queries, of each head, in float32; with blocks there are none."""
    it = account(make_program(ATTENDED.replace("DIM", str(dim)).replace("TYPE", dtype)))
    scores = 2 * 256 * 956 * 4
    assert (it.peak.other > 4 * scores) == (not has)  # of which backward holds six functions


def test_a_layer_more_costs_a_layer() -> None:
    sizes = [layers(count).activations for count in (1, 2, 3, 126)]
    assert [size - sizes[0] for size in sizes] == [0, 5 * X, 10 * X, 125 * 5 * X]


def test_126_layers_take_no_longer_than_2() -> None:
    def seconds(count: int) -> float:
        compiled = make_program(PLAN.replace("layers = 5", f"layers = {count}"))
        before = time.process_time()
        account(compiled)
        return time.process_time() - before

    assert min(seconds(126) for _ in range(5)) < 3 * min(seconds(2) for _ in range(5)) + 0.01


def test_the_fullest_moment_is_where_most_is_on_its_way() -> None:
    it = account(make_program(PLAN.replace("ffn = 8", "ffn = 800")))
    assert (it.peak.where, it.peak.layers, it.peak.name) == (
        "backward",
        (("layers", 5, 5),),
        "down",
    )
    it = account(make_program(PLAN.replace("vocab = 6", "vocab = 6000")))
    assert (it.peak.where, it.peak.layers, it.peak.name) == ("backward", (), "logits")


WHOLE = 2 * 4 * 800
"""The elements of a layer whose `ffn` is 800."""


@pytest.mark.parametrize(
    ("state", "weights", "gradients"),
    [
        ("zero 1 over dp", 0, 0),
        ("zero 2 over dp", 0, 2),
        ("zero 3 over dp", 2, 2),
        ("zero 3 over dp  prefetch = 0", 1, 2),
        ("zero 3 over dp  prefetch = 9", 5, 2),
        ("parameters, optimizer over dp", 2, 0),
    ],
)
def test_turns_in_memory(state: str, weights: int, gradients: int) -> None:
    """In backward's first layer the next ones' weights, and the sum under way of the microbatch
    before.
    """
    it = account(shared(state, ffn=800)).peak
    assert (it.where, it.layers) == ("backward", (("layers", 5, 5),))
    assert (it.weights, it.gradients) == (2 * WHOLE * weights, 4 * WHOLE * gradients)


def test_sums_under_way_may_be_more_than_a_turn_keeps() -> None:
    """Of a single microbatch the second layer is the first with a sum under way."""
    one = PLAN.replace("global_batch = 12", "global_batch = 4")
    wide = account(shared("zero 2 over dp", one, hidden=400, ffn=400)).peak
    assert (wide.layers, wide.gradients) == ((("layers", 4, 5),), 2 * 4 * 2 * 400 * 400)
    narrow = account(shared("zero 2 over dp", one, ffn=800)).peak
    assert (narrow.layers, narrow.gradients) == ((("layers", 5, 5),), 4 * WHOLE)


def test_a_turn_begins_with_sums_under_way_of_repeats_inside() -> None:
    """Of the last layer before it: the first of the layers inside, and what is the block's own."""
    inner = "repeat layers {\n    x = x + silu(x @ up[hidden -> ffn]) @ down[ffn -> hidden]\n  }"
    outer = (
        f"repeat blocks {{ x = x + tanh(x @ own[hidden -> vocab]) @ back[vocab -> hidden] "
        f" {inner} }}"
    )
    text = (
        PLAN.replace(inner, outer)
        .replace("layers = 5", "layers = 5  blocks = 3")
        .replace("= 12", "= 4")
    )
    storages = Storages(shared("zero 2 over dp", text))
    region, passing = (
        next(stmt for stmt in storages.program.backward.body if isinstance(stmt, Region)),
        Passing(storages),
    )
    own, inside = 4 * 2 * 3 * 4, 4 * 64
    assert [(on, passing.gradients) for on in passing.backward(region)] == [
        (0, 0),
        (1, inside + own),
    ]
    assert passing.gradients == inside + own  # of the first layer, until all are waited for


@pytest.mark.parametrize(
    ("state", "kind", "reduce", "meanwhile", "after"),
    [
        ("zero 2 over dp", "pack", "", [], 4 * 64),
        ("zero 2 over dp", "pack", "reduce = bf16", [(4 + 2) * 64], 2 * 64),
        ("zero 1 over dp  bucket = 300B", "begin", "", [], 0),
        ("zero 1 over dp  bucket = 300B", "begin", "reduce = bf16", [2 * 64], 2 * 64),
    ],
)
def test_what_is_sent(state: str, kind: str, reduce: str, meanwhile: list[int], after: int) -> None:
    """A gradient itself, or a copy in another element type: then both are there for a moment,
    unless it is kept.
    """
    text = PLAN.replace("precision = bf16", f"precision = bf16  {reduce}").replace("= 12", "= 4")
    storages = Storages(shared(state, text))
    region, passing = (
        next(stmt for stmt in storages.program.backward.body if isinstance(stmt, Region)),
        Passing(storages),
    )
    op = next(stmt for stmt in region.body if isinstance(stmt, Op) and stmt.kind == kind)
    passing.makes(op.inputs)
    assert [passing.gradients for _ in passing.moves(op)] == meanwhile
    assert passing.gradients == after
    later = Passing(Storages(shared(state, text.replace("global_batch = 4", "global_batch = 12"))))
    # of the microbatch before; what is kept is sent once
    assert later.gradients == (after if kind == "pack" else 0)


def test_forward_gathers_ahead() -> None:
    """The last layer keeps most, the third last has two more gathered."""
    storages = Storages(shared("zero 3 over dp  prefetch = 2"))
    region, passing = (
        next(stmt for stmt in storages.program.forward.body if isinstance(stmt, Region)),
        Passing(storages),
    )
    assert [(back, passing.weights) for back in passing.forward(region)] == [
        (0, 2 * 64),
        (2, 3 * 2 * 64),
    ]
    assert passing.weights == 0


def test_what_turns_gather_is_not_kept() -> None:
    texts = [shared(f"zero {stage} over dp", PLAN) for stage in (1, 2, 3)]
    assert [get_kept_values(account(text)) for text in texts] == [
        get_kept_values(account(make_program(PLAN)))
    ] * 3


def test_of_ir_text_it_is_the_same() -> None:
    """`scalec verify --recheck` begins from such text."""
    compiled = make_program(PLAN)
    again = account(read_ir(Source("tiny.ir", print_ir(compiled))))
    first = account(compiled)
    assert (get_kept_values(again), again.peak.bytes, again.state) == (
        get_kept_values(first),
        first.peak.bytes,
        first.state,
    )


def test_how_it_is_shown(golden: Callable[[str, str], None]) -> None:
    golden("tiny_llama/memory.txt", memory(compile_plan(load(PLANS / "tiny_llama.scale"))) + "\n")


def test_plan_json_has_all_of_it() -> None:
    compiled = shared("zero 3 over dp", ffn=800)
    source = Source("tiny.scale", PLAN)
    said, it = json.loads(emit(compiled, source)["plan.json"])["memory"], account(compiled)
    assert (said["state"], said["activations"], said["capacity"]) == (
        it.state,
        it.activations,
        80 * 2**30,
    )
    assert said["reserve"] == it.reserve > 0
    span = said["range"]
    assert span["low"] + sum(reason["less"] for reason in span["reasons"]) == it.needs
    assert span["high"] - sum(reason["more"] for reason in span["reasons"]) == it.needs
    assert span["low"] < it.needs < span["high"]
    assert sum(each["bytes"] * each["count"] for each in said["kept"]) == it.activations
    assert said["peak"]["bytes"] == said["state"] + said["inputs"] + said["tables"] + sum(
        said["peak"][what] for what in ("kept", "weights", "gradients", "other")
    )


# ---- the commands


def test_explain_memory(capsys: pytest.CaptureFixture[str]) -> None:
    path = PLANS / "llama3_405b.scale"
    assert cli.main(("explain", "memory", str(path))) == 0
    assert capsys.readouterr().out == memory(compile_plan(load(path))) + "\n"
