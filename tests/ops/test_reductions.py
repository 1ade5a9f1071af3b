"""Norms, softmax, reductions and joined dims in whole steps: what they mean, communicate, look
like, and refuse.

Purpose: one plan that uses all of them, sharded in every way that makes sense; its step is proved,
its program read back.  Non-goals: the ops one by one (`test_op_rules`), numbers
(`tests/end_to_end`).
"""

import pytest
from attrs import evolve

from helpers.programs import get_train_py
from helpers.small_plans import ALL_OVER_TP, DIMS, HEAD, START, WITH_SEQ, Plan
from passes.test_steps import blocks, counted, split
from scalec.compiler.emit.readback import check
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.testing import assert_equal_step

ALL = f"""{START}
  repeat layers {{
    a = layernorm(x, norm1[hidden], bias1[hidden], eps)
    q = rope(rmsnorm(a @ wq[hidden -> heads, head_dim], qn[heads, head_dim], eps), theta)
    k = layernorm(a @ wk[hidden -> kv_heads, head_dim], kn[kv_heads, head_dim], kb[kv_heads, head_dim], eps)
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, rope(k, theta), v, mask=causal) @ wo[heads, head_dim -> hidden]
    m = layernorm(x, norm2[hidden], eps)
    gate = softmax(m @ w_gate[hidden -> experts])
    joined = concat(gate, m @ w_few[hidden -> few], gate * gate, as=wide)
    up = layernorm(joined @ w_up[wide -> ffn], norm3[ffn], eps)
    total = sum(gate, over=seq)
    scale = softmax(mean(m, over=seq), over=hidden) * mean(total * total, over=[experts])
    c = concat(total, mean(up, over=[seq, ffn]) * total, as=pair) @ w_pair[pair -> hidden]
    x = x + silu(up) @ w_down[ffn -> hidden] + m * scale * mean(up, over=ffn) + c
  }}
  {HEAD}"""
MORE = f"{DIMS}  experts = 6  few = 3  wide = 2 * experts + few  pair = 2 * experts"
KV = MORE.replace("kv_heads = 2", "kv_heads = 1")

ONE = Plan(ALL, dims=MORE, word="bidirectional")
PLANS = {
    "one device": ONE,
    "data": evolve(ONE, mesh="dp = 2", shard="batch over dp", ranks=2),
    "data, tensor": evolve(ONE, mesh="dp = 2  tp = 2", shard=ALL_OVER_TP, ranks=2),
    "data, tensor, sequence": evolve(ONE, mesh="dp = 2  tp = 2", shard=WITH_SEQ, ranks=2),
    "regather": evolve(
        ONE,
        mesh="dp = 2  tp = 2",
        shard=WITH_SEQ,
        ranks=2,
        train="precision = fp64  gathered = regather",
    ),
    "bf16": evolve(ONE, mesh="dp = 2  tp = 2", shard=WITH_SEQ, ranks=2, train="precision = bf16"),
    "two key/value heads on four ranks": evolve(
        ONE, mesh="tp = 4", shard=WITH_SEQ.replace("batch over dp  ", "")
    ),
    "one key/value head": evolve(ONE, mesh="dp = 2  tp = 2", shard=ALL_OVER_TP, ranks=2, dims=KV),
    "two axes of one dim": evolve(
        ONE, mesh="a = 2  tp = 2", shard="ffn over a, tp  heads, kv_heads over tp"
    ),
    "tensor outside of data": evolve(ONE, mesh="tp = 2  dp = 2", shard=WITH_SEQ, ranks=2),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PLANS)
def test_steps_are_those_of_a_single_device(name: str) -> None:
    assert_equal_step(PLANS[name].text())


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PLANS)
def test_programs_are_read_back(name: str) -> None:
    text, program = get_train_py(PLANS[name].text())
    check(text, program)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PLANS)
def test_ir_reads_back(name: str) -> None:
    for stage in ("resolve", "insert_collectives", "fuse_buckets"):
        program = PLANS[name].program(stage)
        assert read_ir(Source("plan.ir", print_ir(program))) == program


# ---- what norms over a sharded dim communicate


def layer(norm: str, shard: str = ALL_OVER_TP) -> tuple[str, str]:
    """The collectives over tp, forward and backward, of a layer with and without a norm of its
    sharded features.
    """
    body = f"""{START} repeat layers {{
      up = x @ w_up[hidden -> ffn]
      x = x + silu({norm}) @ w_down[ffn -> hidden] }} {HEAD}"""
    plan = Plan(body, "dp = 2  tp = 2", shard, ranks=2)
    forward, backward = (counted(split(block)[1]) for block in blocks(plan))
    return forward, backward


@pytest.mark.parametrize(
    ("norm", "more"),
    [
        ("rmsnorm(up, g[ffn], eps)", 1),
        ("layernorm(up, g[ffn], eps)", 2),
        ("layernorm(up, g[ffn], b[ffn], eps)", 2),
    ],
)
def test_a_norm_over_a_sharded_dim_is_small_reductions(norm: str, more: int) -> None:
    """One number for each token, each way; layernorm first needs the mean, then the variance
    about it.
    """
    assert layer("up") == ("reduce 1", "reduce 1")
    assert layer(norm) == (f"reduce {1 + more}", f"reduce {1 + more}")
    gathered = "gather 1, reduce {}, scatter 1"
    assert layer(norm, WITH_SEQ) == (gathered.format(more), gathered.format(more))


def test_a_norm_over_whole_dims_communicates_nothing() -> None:
    assert layer("rmsnorm(up, g[ffn], eps)", "batch over dp  vocab over tp") == ("", "")


# ---- how they are emitted

LINES = (
    "a = layer_norm(x, self.norm1, self.bias1, eps=1e-5)",
    "square = mean_square(q, dim=(2, 3), size=8)",
    "square = replicate(square, self.tp)",
    "q = rope(rms_scaled(q, self.qn, square, eps=1e-5), rotary)",
    "centred = k - mean_.unsqueeze(2).unsqueeze(3)",
    "m = layer_norm(x, self.norm2, eps=1e-5)",
    "gate = softmax(linear(m, self.w_gate), dim=2)",
    "joined = concat(gate, linear(m, self.w_few), gate * gate)",
    "total = torch.sum(gate, dim=0)",
)


@pytest.mark.parametrize("line", LINES)
def test_lines_read_as_a_person_would_write_them(line: str) -> None:
    assert f" {line}  # [" in get_train_py(PLANS["data, tensor, sequence"].text())[0]


WRONG = (
    (
        "layer_norm(x, self.norm1, self.bias1, eps=1e-5)",
        "layer_norm(x, self.bias1, self.norm1, eps=1e-5)",
    ),
    ("layer_norm(x, self.norm1, self.bias1, eps=1e-5)", "layer_norm(x, self.norm1, eps=1e-5)"),
    (
        "layer_norm(x, self.norm1, self.bias1, eps=1e-5)",
        "layer_norm(x, self.norm1, self.bias1, eps=1e-6)",
    ),
    ("layer_norm(x, self.norm2, eps=1e-5)", "rms_norm(x, self.norm2, eps=1e-5)"),
    ("layer_norm(x, self.norm2, eps=1e-5)", "layer_norm(x, self.norm2, self.norm2, eps=1e-5)"),
    ("mean_square(q, dim=(2, 3), size=8)", "mean_square(q, dim=(2, 3), size=4)"),
    ("mean_square(q, dim=(2, 3), size=8)", "mean_square(q, dim=3, size=2)"),
    ("mean_square(q, dim=(2, 3), size=8)", "mean(q, dim=(2, 3), size=8)"),
    ("mean_square(q, dim=(2, 3), size=8)", "mean_square(q, dim=(2, -1), size=8)"),
    ("rms_scaled(q, self.qn, square, eps=1e-5)", "rms_scaled(q, self.qn, q, eps=1e-5)"),
    ("square = replicate(square, self.tp)", ""),
    ("k - mean_.unsqueeze(2).unsqueeze(3)", "k + mean_.unsqueeze(2).unsqueeze(3)"),
    ("softmax(linear(m, self.w_gate), dim=2)", "softmax(linear(m, self.w_gate), dim=1)"),
    (
        "concat(gate, linear(m, self.w_few), gate * gate)",
        "concat(linear(m, self.w_few), gate, gate * gate)",
    ),
    ("concat(gate, linear(m, self.w_few), gate * gate)", "concat(gate, linear(m, self.w_few))"),
    ("torch.sum(gate, dim=0)", "torch.sum(gate, dim=1)"),
    ("torch.sum(gate, dim=0)", "torch.sum(gate, dim=(0, 1))"),
    ("torch.sum(gate, dim=0)", "mean(gate, dim=0, size=4)"),
)


@pytest.mark.parametrize(("right", "wrong"), WRONG, ids=[wrong for _, wrong in WRONG])
def test_the_read_back_refuses_anything_else(right: str, wrong: str) -> None:
    text, program = get_train_py(PLANS["data, tensor, sequence"].text())
    assert right in text
    with pytest.raises(AssertionError, match=r"emit: line \d+: "):
        check(text.replace(right, wrong, 1), program)


# ---- what is refused

REFUSED = {  # what a layer does → the code, and a part of what is said
    "rmsnorm(x, g[hidden])": ("E0606", "`rmsnorm` needs an argument `eps`"),
    "layernorm(x, g[hidden], b[hidden])": ("E0606", "`layernorm` needs an argument `eps`"),
    "layernorm(x, eps)": ("E0606", "`layernorm` needs an argument `weight`"),
    "layernorm(x, g[hidden], b[head_dim], eps)": ("E0307", "a bias of the dims of its weight"),
    "layernorm(x, g[hidden], eps, bias=b[hidden])": ("", ""),
    "layernorm(x, g[hidden], b[hidden], eps, eps)": ("E0606", "`layernorm` takes fewer arguments"),
    "softmax(x, over=hiden)": ("E0201", "did you mean `hidden`"),
    "softmax(x, over=heads)": ("E0307", "its dims are [batch, seq, hidden]"),
    "softmax(x, over=[seq, hidden])": ("E0307", "softmax goes over one dim"),
    "softmax(x, over=batch)": ("E0307", "samples are independent of each other"),
    "softmax(sum(x, over=[seq, hidden]))": ("E0307", "which is not batch"),
    "softmax(x, over=2)": ("E0307", "a dim is needed here"),
    "roll(x, 1, over=hidden)": ("", ""),
    "roll(x, 0.5)": ("E0313", "`by` is a whole number"),
    "roll(x, 1, over=[seq, hidden])": ("E0307", "roll goes over one dim"),
    "mean(x)": ("E0606", "`over` is missing"),
    "mean(x, over=[])": ("E0307", "each named once"),
    "sum(x, over=[seq, seq])": ("E0307", "each named once"),
    "sum(x, x, over=seq)": ("E0606", "`sum` takes `over` once"),
    "concat(x, x, as=blocks)": ("E0307", "blocks is 2, but hidden 4 + hidden 4 = 8"),
    "concat(x, as=blocks)": ("E0307", "blocks is 2, but hidden 4 = 4"),
    "concat()": ("E0606", "`x` is missing"),
    "concat(x @ w1[hidden -> ffn, blocks], x @ w2[hidden -> vocab, blocks], as=hidden)": (
        "E0307",
        "of the same dims, or of some of them, but for their last dims",
    ),
    "concat(x, x)": ("E0606", "`concat` needs an argument `as`"),
    "concat(x, x, as=seq)": ("E0307", "joins dims of the model"),
}


@pytest.mark.parametrize("expression", REFUSED)
def test_mistakes_are_said_with_their_arithmetic(expression: str) -> None:
    code, words = REFUSED[expression]
    plan = Plan(
        f"{START} y = {expression}  x = x + mean(y * y, over=seq) {HEAD}", word="bidirectional"
    )
    if not code:
        plan.program()
        return
    with pytest.raises(PlanError) as caught:
        plan.program()
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == [code]
    assert words in str(caught.value)


@pytest.mark.parametrize("op", ["softmax(y)", "concat(y, y, as=vocab)"])
def test_what_has_to_be_whole_is_not_sharded(op: str) -> None:
    body = (
        f"{START} y = x @ w[hidden -> ffn]  x = x + sum({op},"
        f" over={'ffn' if 'soft' in op else 'vocab'}) {HEAD}"
    )
    plan = Plan(body, "tp = 2", "ffn over tp", dims=DIMS.replace("vocab = 12", "vocab = 16"))
    with pytest.raises(PlanError) as caught:
        plan.program()
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == ["E0601"]
