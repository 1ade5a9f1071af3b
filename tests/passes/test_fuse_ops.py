"""Which ops are fused, and which stand by themselves; `texts/fused_*.ir` show whole layers."""

from collections import Counter

import pytest
from attrs import evolve

from helpers.plan_table import DP_TP, FUSED, NO_DP
from helpers.small_plans import DIMS, HEAD, LLAMA, START, Plan
from scalec.compiler.analysis.communication import collectives
from scalec.compiler.emit import emit
from scalec.compiler.ir import Op, Program, walk
from scalec.compiler.ops.fused import CONTRACTS, GATES, NORMS
from scalec.compiler.ops.fused_loss import LINEAR_CROSS_ENTROPY
from scalec.compiler.ops.fused_parallel_loss import LINEAR_PARTS, LOGIT_PARTS, REJOINED
from scalec.compiler.ops.rope import ROPE_PAIR
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

ONE = Plan(train=FUSED)
TP = Plan(mesh="tp = 2", shard=NO_DP, train=FUSED)
NEW = {
    *(
        CONTRACTS.name,
        LINEAR_CROSS_ENTROPY.name,
        LINEAR_PARTS.name,
        LOGIT_PARTS.name,
        REJOINED.name,
        ROPE_PAIR.name,
    ),
    *GATES.values(),
    *NORMS.values(),
}


def fused(plan: Plan) -> Program:
    return plan.program("fuse_ops")


def kinds(plan: Plan) -> list[str]:
    """The kinds of the ops that were fused, in order."""
    return [op.kind for op in walk(fused(plan).region.body) if op.kind in NEW]


def only(plan: Plan, kind: str) -> Op:
    (found,) = [op for op in walk(fused(plan).region.body) if op.kind == kind]
    return found


def body(statements: str, plan: Plan = ONE, head: str = HEAD) -> Plan:
    """A plan whose repeat has these statements."""
    return evolve(plan, body=f"{START} repeat layers {{ {statements} }} {head}")


# ---- what is fused

LAYER = ["contracts", "rope_pair", "add_rmsnorm", "contracts", "silu_mul"]


def test_a_llama_whose_vocabulary_is_shared_out() -> None:
    assert kinds(evolve(DP_TP, train=FUSED)) == [
        *LAYER,
        "linear_softmax_stats",
        "rescale_to_global_max",
    ]


def test_a_gate_has_the_functions_attributes() -> None:
    gelu = body("x = x + gelu(x, approximate=tanh) * exp(x)")
    assert only(gelu, "gelu_mul").attrs == (("approximate", "tanh"),)


@pytest.mark.parametrize("product", ["silu({a}) * {b}", "{b} * silu({a})"])
def test_a_gate_takes_the_functions_operand_first(product: str) -> None:
    plan = body(f"x = x + {product.format(a='tanh(x)', b='exp(x)')}")
    made = {value.name: op.kind for op in walk(fused(plan).region.body) for value in op.outputs}
    assert [made[name] for name in only(plan, "silu_mul").inputs] == ["tanh", "exp"]


def test_the_sum_and_the_norm_of_layers() -> None:
    """A sum at the end of a layer has its norm in the next one: it stands by itself."""
    plan = body("m = layernorm(x + silu(x), g[hidden], c[hidden], eps) x = x + m")
    assert kinds(plan) == ["linear_cross_entropy"]
    plan = body("x = x + silu(x) m = layernorm(x, g[hidden], c[hidden], eps) x = x + tanh(m)")
    assert kinds(plan) == ["add_layernorm", "linear_cross_entropy"]


def test_the_head_has_the_losses_options_and_the_cap() -> None:
    head = HEAD.replace("cross_entropy(", "cross_entropy(softcap(").replace(
        "@ head[hidden -> vocab], labels)",
        "@ head[hidden -> vocab], 2), labels, smoothing=0.1, z=0.25)",
    )
    op = only(evolve(ONE, body=LLAMA.replace(HEAD, head)), "linear_cross_entropy")
    assert dict(op.attrs) == {"inner": ("hidden",), "smoothing": 0.1, "z": 0.25, "cap": 2.0}
    parts = evolve(TP, body=LLAMA.replace(HEAD, head))
    assert dict(only(parts, "linear_softmax_stats").attrs) == {
        "inner": ("hidden",),
        "smoothing": 0.1,
        "cap": 2.0,
        "as": "vocab_shares",
    }
    assert dict(only(parts, "rescale_to_global_max").attrs) == {
        "smoothing": 0.1,
        "classes": "vocab",
    }


def test_what_ranks_share_out_has_a_dim_of_one_for_each() -> None:
    program = fused(TP)
    assert program.size("vocab_shares") == 2
    z = only(TP, "linear_softmax_stats").outputs[1].type
    assert (z.dims[-1], z.axes_of("vocab_shares")) == ("vocab_shares", ("tp",))


# ---- what is not

APART = {
    "a function that is used besides": "s = silu(x) x = x + s * tanh(x) + s",
    "a function of a value of fewer dims": "x = x + x * silu(g[hidden])",
    "a function without a gate of its own": "x = x + sigmoid(x) * tanh(x)",
    "a sum that its norm alone takes": "x = rmsnorm(x + silu(x), g[hidden], eps)",
    "a sum of three": "y = x + silu(x) + tanh(x) x = y * rmsnorm(y, g[hidden], eps)",
    "a sum of values of different dims": "y = x + g[hidden] x = y * rmsnorm(y, h[hidden], eps)",
    "a norm whose weight is computed": "y = x + exp(x) x = y * rmsnorm(y, silu(h[hidden]), eps)",
    "products of different values": "x = x + tanh(x @ w[hidden -> ffn]) @ v[ffn -> hidden]",
    "products with weights of different numbers of dims": (
        "y = tanh(x @ w[hidden -> heads, head_dim]) @ a[heads, head_dim -> hidden]"
        " z = tanh(x @ u[hidden -> ffn]) @ b[ffn -> hidden] x = x + y * z"
    ),
    "products with one weight": (
        "x = x + exp(x @ w[hidden -> ffn]) @ v[ffn -> hidden] + tanh(x @ w) @ v"
    ),
    "a rotation of one operand": "q = x @ w[hidden -> heads, head_dim]"
    " x = x + attention(rope(q, theta), q, q, causal) @ o[heads, head_dim -> hidden]",
    "rotations by different angles": "q = x @ w[hidden -> heads, head_dim]"
    " x = x + attention(rope(q, theta), rope(q, 2), q, causal) @ o[heads, head_dim -> hidden]",
}


@pytest.mark.parametrize("what", APART)
def test_what_is_not_fused(what: str) -> None:
    """Of a repeat; the head is."""
    assert kinds(body(APART[what])) == ["linear_cross_entropy"]


def test_products_with_weights_over_different_axes_are_apart() -> None:
    """One of a matrix that is whole, and one of a part of another."""
    statement = (
        "x = x + tanh(x @ w[hidden -> ffn]) @ v[ffn -> hidden] + (x @ u[hidden -> blocks]) @"
        " t[blocks -> hidden]"
    )
    assert "contracts" in kinds(body(statement))
    assert "contracts" not in kinds(body(statement, evolve(TP, shard="ffn over tp")))


IN_PARTS = ["logit_softmax_stats", "rescale_to_global_max"]
TWO_LOSSES = "loss = cross_entropy(y, labels) + cross_entropy(y, labels, smoothing=0.1)"


@pytest.mark.parametrize(
    ("head", "losses"),
    [
        (f"y = x @ head[hidden -> vocab] {TWO_LOSSES}", 2),
        ("loss = cross_entropy(tanh(x @ head[hidden -> vocab]), labels)", 1),
        ("loss = cross_entropy(x @ silu(head[vocab, hidden]), labels)", 1),
    ],
    ids=["two losses", "a function of them", "a weight that is computed"],
)
def test_logits_that_are_not_their_loss_own_are_made(head: str, losses: int) -> None:
    """Where ranks share the vocabulary out, each loss still goes through them once."""
    assert kinds(evolve(ONE, body=f"{START} {head}")) == []
    assert kinds(evolve(TP, body=f"{START} {head}")) == IN_PARTS * losses


@pytest.mark.parametrize("sum_", ["{} + b[vocab]", "b[vocab] + {}"])
@pytest.mark.parametrize("cap", ["{}", "softcap({}, 2)"])
def test_a_bias_goes_into_the_product(sum_: str, cap: str) -> None:
    logits = cap.format(sum_.format("x @ head[hidden -> vocab]"))
    head = f"loss = cross_entropy({logits}, labels, smoothing=0.1)"
    for plan, kind, kinds_ in (
        (ONE, "linear_cross_entropy", []),
        (TP, "linear_softmax_stats", ["rescale_to_global_max"]),
    ):
        plan = evolve(plan, body=f"{START} {head}")
        assert kinds(plan) == [kind, *kinds_]
        op = only(plan, kind)
        assert [name.partition(".")[0] for name in op.inputs] == ["x", "head", "labels", "b"]
        assert not {"add", "softcap"} & {op.kind for op in walk(fused(plan).region.body)}


@pytest.mark.parametrize(
    "logits",
    [
        "x @ head[hidden -> vocab] + silu(b[vocab])",
        "x @ head[hidden -> vocab] + b[vocab] + c[vocab]",
        "x @ head[hidden -> vocab] + b[seq, vocab]",
        "softcap(x @ head[hidden -> vocab], 2) + b[vocab]",
        "-(x @ head[hidden -> vocab]) + b[vocab]",
        "(x @ head[hidden -> vocab]) * g[vocab] + b[vocab]",
    ],
)
def test_other_sums_are_made(logits: str) -> None:
    head = f"loss = cross_entropy({logits}, labels)"
    assert kinds(evolve(ONE, body=f"{START} {head}")) == []
    assert kinds(evolve(TP, body=f"{START} {head}")) == IN_PARTS


def test_a_cap_alone_goes_into_the_loss() -> None:
    head = "loss = cross_entropy(softcap(tanh(x @ head[hidden -> vocab]), 2), labels, z=0.25)"
    one, parts = (evolve(plan, body=f"{START} {head}") for plan in (ONE, TP))
    assert dict(only(one, "cross_entropy").attrs) == {"z": 0.25, "cap": 2.0}
    assert dict(only(parts, "logit_softmax_stats").attrs) == {"cap": 2.0, "as": "vocab_shares"}
    assert "softcap" not in {
        op.kind for plan in (one, parts) for op in walk(fused(plan).region.body)
    }


def test_a_cap_of_what_serves_two_losses_stands_by_itself() -> None:
    head = f"y = softcap(x @ head[hidden -> vocab], 2) {TWO_LOSSES}"
    for plan in (ONE, TP):
        assert only(evolve(plan, body=f"{START} {head}"), "softcap").get("cap") == 2


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp16", "cross_entropy"), ("bf16", "linear_cross_entropy")]
)
def test_a_cap_in_few_bits(precision: str, kind: str) -> None:
    """Of float16 the product is made, where each rank has the whole vocabulary."""
    head = "loss = cross_entropy(softcap(x @ head[hidden -> vocab], 2), labels)"
    train = f"precision = {precision}  kernels = triton  logits = chunk"
    assert only(evolve(ONE, body=f"{START} {head}", train=train), kind).get("cap") == 2
    assert kinds(evolve(TP, body=f"{START} {head}", train=train)) == [
        "linear_softmax_stats",
        "rescale_to_global_max",
    ]


@pytest.mark.parametrize(
    ("again", "kind"), [("softcap", "logit_softmax_stats"), ("silu", "linear_softmax_stats")]
)
def test_a_cap_that_backward_does_again_stands_by_itself(again: str, kind: str) -> None:
    head = "loss = cross_entropy(softcap(silu(x) @ head[hidden -> vocab], 2), labels)"
    plan = evolve(TP, body=f"{START} {head}", train=f"{FUSED}  recompute = selective({again})")
    assert kinds(plan) == [kind, "rescale_to_global_max"]


CALLS = [
    ("over cp via gather", FUSED, 1, 1),
    ("over cp as zigzag via gather", FUSED, 1, 1),
    ("over cp via ulysses", FUSED, 3, 3),
    ("over cp via ulysses", "", 4, 4),
    ("over cp via gather", "", 2, 2),
    ("over cp via gather", f"{FUSED} gathered = regather", 2, 4),
]
"""Rules of the sequence, settings, and the calls over cp in forward and in backward."""


@pytest.mark.parametrize(("rule", "train", "forward", "backward"), CALLS)
def test_keys_and_values_travel_side_by_side(
    rule: str, train: str, forward: int, backward: int
) -> None:
    program = Plan(mesh="cp = 2", shard=f"seq {rule}", train=train).program()
    found = Counter(each.where for each in collectives(program) if each.use == "activations")
    assert (found["forward"], found["backward"]) == (forward, backward)


@pytest.mark.parametrize("kernels", ["kernels = torch", "", "kernels = auto"])
def test_without_kernels_nothing_is_fused(kernels: str) -> None:
    assert kinds(evolve(DP_TP, train=f"precision = fp64  {kernels}")) == []


def test_a_gpu_for_which_kernels_are_written_has_them() -> None:
    text = DP_TP.text()
    found = {
        gpu: compile_plan(
            Source("tiny.scale", f"{text}\ncluster {{ gpu = {gpu} }}"), "resolve"
        ).train.kernels
        for gpu in ("h100_sxm", "t4", "unheard_of  memory = 64GiB")
    }
    assert [*found.values()] == ["triton", "torch", "torch"]


def test_what_backward_does_again_by_name_stays_what_it_is() -> None:
    again = f"{FUSED}  recompute = selective(silu, rmsnorm, rope, cross_entropy)"
    assert kinds(evolve(ONE, train=again)) == ["contracts", "contracts"]


def test_what_backward_does_again_by_turns_is_fused() -> None:
    assert kinds(evolve(ONE, train=f"{FUSED}  recompute = full")) == [
        *LAYER,
        "linear_cross_entropy",
    ]


def test_stages_of_a_pipeline_are_fused_too() -> None:
    plan = (
        f"{evolve(ONE, mesh='pp = 2').text()} shard {{ layers over pp }} pipeline {{ schedule"
        f" = 1f1b }}"
    )
    plan = plan.replace("shard {  }", "", 1)
    program = compile_plan(Source("tiny.scale", plan), "fuse_ops")
    assert [op.kind for op in program.ops if op.kind in NEW] == [*LAYER, "linear_cross_entropy"]


ROPE = "rope({x} @ {w}[hidden -> {heads}, head_dim], theta)"
Q, K, K2 = (
    f"{name} = {ROPE.format(x='x', w=f'w{name}', heads=heads)}"
    for name, heads in (("q", "heads"), ("k", "kv_heads"), ("k2", "kv_heads"))
)
V, OUT = "v = x @ wv[hidden -> kv_heads, head_dim]", "@ wo[heads, head_dim -> hidden]"
TWICE = f"x = x + (attention(q, k, v, mask=causal) + attention(q, k2, v, mask=causal)) {OUT}"


@pytest.mark.parametrize(
    ("statements", "pairs"),
    [
        (f"{Q} s = silu(q) {K} {V} x = x + (attention(q, k, v, mask=causal) + s) {OUT}", 0),
        (f"{Q} {K2} {K} {V} {TWICE}", 0),
        (f"{K} {K2} {Q} {V} {TWICE}", 1),
    ],
    ids=["used between", "of two attentions", "taken already"],
)
def test_rotations_that_something_else_needs_earlier_stand_by_themselves(
    statements: str, pairs: int
) -> None:
    assert kinds(body(statements)).count("rope_pair") == pairs


def test_the_dim_of_shares_is_not_the_plans() -> None:
    own = "x = x + silu(x @ wa[hidden -> vocab_shares]) @ wb[vocab_shares -> hidden]"
    plan = body(own, evolve(TP, dims=f"{DIMS}  vocab_shares = 3"))
    assert only(plan, "linear_softmax_stats").get("as") == "vocab_shares_"


@pytest.mark.parametrize(("gpu", "fuses"), [("t4", False), ("a100_80gb", True)])
def test_auto_goes_by_the_gpu(gpu: str, fuses: bool) -> None:
    text = evolve(ONE, train="kernels = auto").text() + f" cluster {{ gpu = {gpu} }}"
    made = {op.kind for op in walk(compile_plan(Source("gpu.scale", text), "fuse_ops").region.body)}
    assert bool(NEW & made) == fuses


def test_an_old_gpu_cannot_be_given_ours() -> None:
    text = ONE.text() + " cluster { gpu = t4 }"
    with pytest.raises(PlanError) as raised:
        compile_plan(Source("old.scale", text), "resolve")
    (found,) = raised.value.diagnostics
    assert (found.code, found.label) == ("E0413", "`t4` has 7.5")


# ---- whether logits are kept


def _logits(plan: Plan) -> tuple[str, list[str]]:
    """What the plan's logits are, and the ops of its loss."""
    program = fused(plan)
    losses = {LINEAR_CROSS_ENTROPY.name, LINEAR_PARTS.name, LOGIT_PARTS.name, "cross_entropy"}
    return program.train.logits, [op.kind for op in program.ops if op.kind in losses]


@pytest.mark.parametrize(
    ("said", "whole", "shared"),
    [
        ("auto", ("chunk", ["linear_cross_entropy"]), ("save", ["logit_softmax_stats"])),
        ("save", ("save", ["cross_entropy"]), ("save", ["logit_softmax_stats"])),
        ("chunk", ("chunk", ["linear_cross_entropy"]), ("chunk", ["linear_softmax_stats"])),
    ],
)
def test_logits_are_kept_or_made_in_chunks(
    said: str, whole: tuple[str, list[str]], shared: tuple[str, list[str]]
) -> None:
    train = f"kernels = triton  logits = {said}"
    assert _logits(evolve(ONE, train=train)) == whole
    assert _logits(evolve(TP, train=train)) == shared


@pytest.mark.parametrize(("seq", "logits"), [(1024, "chunk"), (1023, "save")])
def test_from_a_gib_on_a_rank_logits_are_made_in_chunks(seq: int, logits: str) -> None:
    """Of 131072 classes on 2 ranks, in 4 bytes, 4 sequences of so many tokens."""
    dims = DIMS.replace("vocab = 12", "vocab = 131072")
    plan = evolve(TP, dims=dims, seq=seq, train="precision = fp32  kernels = triton")
    assert plan.program("resolve").train.logits == logits


def test_chunks_need_kernels() -> None:
    text = evolve(ONE, train="kernels = torch  logits = chunk").text()
    with pytest.raises(PlanError) as raised:
        compile_plan(Source("torch.scale", text), "resolve")
    (found,) = raised.value.diagnostics
    assert found.code == "E0414"
    assert found.span.line == next(
        i for i, line in enumerate(text.splitlines(), 1) if "logits = chunk" in line
    )


def test_a_head_of_fewer_classes_than_tokens_reads_back() -> None:
    plan = evolve(
        ONE,
        dims=f"{DIMS}  classes = 5",
        body=LLAMA.replace("head[hidden -> vocab]", "head[hidden -> classes]"),
    )
    source = Source("few.scale", plan.text())
    assert "    vocab=CLASSES," in emit(compile_plan(source), source)["train.py"]
