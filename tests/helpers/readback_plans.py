"""Small plans of every kind, for tests of the read-back.  No tests."""

import ast
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from helpers.edited_text import replace_all
from scalec.compiler.emit.readback import check, check_files
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import Program
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"

DIMS = (
    "vocab = 64  hidden = 32  heads = 4  kv_heads = 2  head_dim = 8  ffn = 64  layers = 2 "
    " blocks = 3  rest = 2"
)
START = "x = embedding(tokens, wte[vocab, hidden])"
ATTENTION = """
    a = rmsnorm(x, norm1[hidden], 1e-5)
    q = rope(a @ wq[hidden -> heads, head_dim], 10000)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], 10000)
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]"""
MLP = """
    m = rmsnorm(x, norm2[hidden], 1e-5)
    x = x + (silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn])) @ w_down[ffn -> hidden]"""
LAYERS = f"repeat layers {{ {ATTENTION} {MLP} }}"
LOSS = "loss = cross_entropy(rmsnorm(x, norm[hidden], 1e-5) @ head[hidden -> vocab], labels)"
TIED = "loss = cross_entropy(rmsnorm(x, norm[hidden], 1e-5) @ wte, labels)"
LLAMA = f"{START} {LAYERS} {LOSS}"
PARALLEL = f"""{START}
  repeat layers {{
    a = rmsnorm(x, norm1[hidden], 1e-5)
    q = rope(a @ wq[hidden -> heads, head_dim], 10000)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], 10000)
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
          + silu(a @ w_up[hidden -> ffn]) @ w_down[ffn -> hidden]
  }}
  {LOSS}"""
CAPTURED = f"""{START} y = silu(x) z = silu(x) g = silu(gate[hidden])
  repeat layers {{ {ATTENTION} {MLP} x = x + y * z * g * gate }} {LOSS}"""
NESTED = (
    f"{START} repeat blocks {{ b = rmsnorm(x, norm3[hidden], 1e-5) {LAYERS} x = x + b }} {LOSS}"
)
TWO = f"{START} repeat blocks {{ {ATTENTION} }} repeat layers {{ {MLP} }} {TIED}"
TWO_LOSSES = f"{START} {LOSS.replace('= ', '= cross_entropy(x @ wte + bias[vocab], labels) + ')}"
TAKEN_ON = f"{START} y = silu(x) repeat layers {{ {ATTENTION} y = y + x {MLP} }} x = y {LOSS}"
CARRIED = f"{START} y = silu(x) repeat layers {{ {ATTENTION} {MLP} y = y + x }} x = x + y {LOSS}"

SKIP = f"""{START} s = silu(x)
  repeat layers {{ {ATTENTION} x = dropout(x, 0.1) }} s = s * x
  repeat blocks {{ {MLP} x = dropout(x, 0.1) }} x = x * s {TIED}"""
UNLIKE = f"""{START} s = silu(x)
  repeat layers {{ {ATTENTION} x = x + s }} y = (x * s) @ w_wide[hidden -> ffn]
  repeat blocks {{ y = y * tanh(y * gate[ffn]) }} z = y @ w_narrow[ffn -> hidden] x = silu(z)
  repeat rest {{ x = x + z * tanh(x) }} {LOSS}"""
ROUTED = f"""{START}
  repeat layers {{
    {ATTENTION}
    m = rmsnorm(x, norm2[hidden], 1e-5)
    route m to experts by top(
        m @ router[hidden -> experts], 3, score=sigmoid, normalise=on, scale=2.5, balance=0.1, z=0.01, capacity=1.5,
        aux_loss=0.1) {{
      m = (silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn])) @ w_down[ffn -> hidden]
    }}
    x = x + m
  }}
  {LOSS}"""
WHOLE = (
    f"{START} repeat blocks {{ {MLP} }} x = dropout(x, 0.1) repeat layers {{ {ATTENTION} }} {LOSS}"
)

FUSED = LLAMA.replace(", labels)", ", labels, smoothing=0.1, z=0.01)").replace("silu(", "gelu(")
CAPPED = f"""{START} {LAYERS}
  loss = cross_entropy(softcap(layernorm(x, norm[hidden], bias[hidden], 1e-5) @ wte, 30), labels, z=0.01)"""

BIASED = f"{START} {LAYERS} {TIED.replace('wte', 'wte + b_head[vocab]')}"
OF_LOGITS = f"""{START} {LAYERS} y = softcap(rmsnorm(x, norm[hidden], 1e-5) @ wte, 20)
  loss = cross_entropy(y, labels, smoothing=0.1, z=0.01) + cross_entropy(softcap(y, 30), labels)"""

KERNELS = "kernels = triton  logits = chunk"
SHARD = "batch over dp  vocab, heads, kv_heads, ffn over tp"
ADAM = "adamw { lr = 1e-2  clip = 1.0 }"
GROUPS = (
    'adamw { lr = 1e-2 clip = 1.0 group small { params = ["norm*", "wte"] weight_decay = 0.5'
    " lr_scale = 2.0 } }"
)
FP16 = "precision = fp16  reduce = bf16"

HYBRID = {
    "mesh": "replica = 2  dp = 2  tp = 2",
    "shard": f"{SHARD} seq over tp".replace("dp", "replica, dp"),
}


def plan(
    model: str = LLAMA,
    mesh: str = "dp = 2  tp = 2",
    shard: str = f"{SHARD}  seq over tp",
    options: str = "",
    optimizer: str = ADAM,
    state: str = "",
    pipeline: str = "",
) -> str:
    """The text of a plan."""
    return f"""model small(tokens[batch, seq], labels[batch, seq]) {{ dims {{ {DIMS} }} init ~ normal(0.02)
  {model} }}
mesh {{ {mesh} }}
shard {{ {shard} }}
{f"state {{ {state} }}" if state else ""}
{f"pipeline {{ schedule = {pipeline} }}" if pipeline else ""}
train {{ seq = 16  global_batch = 8  microbatch = 2  steps = 3 {options}
  optimizer {optimizer}  data text {{ files = [python_stdlib] }} }}"""


def staged(model: str, schedule: str, cut: str = "layers", **options: str) -> str:
    """The text of a plan on eight ranks, in stages: of four layers and three blocks."""
    text = plan(
        model,
        "pp = 2  dp = 2  tp = 2",
        f"{SHARD}  seq over tp  {cut} over pp",
        pipeline=schedule,
        **options,
    )
    return text.replace("layers = 2", "layers = 4").replace("global_batch = 8", "global_batch = 32")


CHUNKS = "interleaved_1f1b(chunks=2)"

DATA = "[python_stdlib]"
DOCUMENTS = (
    plan(LLAMA.replace("mask=causal", "mask=causal, documents=documents"))
    .replace("labels[batch, seq]", "labels[batch, seq], documents[batch, seq]")
    .replace(DATA, f"{DATA}  separator = 10")
)

SMALL = {
    "documents": DOCUMENTS,
    "masked": plan()
    .replace(DATA, f"{DATA}  masked = 15%  mask_token = 3")
    .replace("causal", "full")
    .replace("seq]) {", "seq]) bidirectional {"),
    "sequence parallel": plan(),
    "tensor parallel": plan(shard=SHARD),
    "data parallel": plan(mesh="dp = 4", shard="batch over dp"),
    "hybrid": plan(**HYBRID),
    "one rank": plan(mesh="", shard="", optimizer="sgd { lr = 1e-2  momentum = 0.9 }"),
    "regather": plan(options="gathered = regather"),
    "full": plan(options="recompute = full  gathered = regather"),
    "every": plan(
        options="recompute = every(2, layers)  gathered = regather", state="zero 3 over dp"
    ),
    "selective": plan(options="recompute = selective(attention, silu)"),
    "selective, nested": plan(
        NESTED, options="gathered = regather  recompute = selective(rmsnorm, rope, silu)"
    ),
    "compiled": plan(TWO, options="compile = on  recompute = full"),
    "compiled, nested": plan(NESTED, options="compile = on"),
    "compiled, no repeat": plan(f"{START} {LOSS}", mesh="", shard="", options="compile = on"),
    "compiled, stages": staged(f"{START} {LAYERS} {TIED}", CHUNKS, options="compile = on"),
    "kv heads fewer": plan(mesh="dp = 2  tp = 4", options="precision = bf16  gathered = regather"),
    "vocabulary whole": plan(
        shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp", options="precision = fp64"
    ),
    "tied": plan(f"{START} {LAYERS} {TIED}", options="gathered = regather"),
    "parallel block": plan(PARALLEL, options="gathered = regather"),
    "captured": plan(CAPTURED),
    "nested": plan(NESTED, options="gathered = regather"),
    "two repeats": plan(TWO),
    "two carried": plan(CARRIED),
    "two losses": plan(TWO_LOSSES, mesh="ep = 2", shard="hidden over ep"),
    "groups": plan(optimizer=GROUPS),
    "fused": plan(FUSED, options=f"{KERNELS}  recompute = full"),
    "fused, vocabulary whole": plan(
        CAPPED, shard="batch over dp  heads, kv_heads, ffn over tp", options=KERNELS
    ),
    "fused, bias": plan(BIASED, options=f"{KERNELS}  gathered = regather").replace(
        "vocab = 64", "vocab = 61 pad 4"
    ),
    "fused, bias, vocabulary whole": plan(
        BIASED, shard="batch over dp  heads, kv_heads, ffn over tp", options=KERNELS
    ),
    "fused, bias, stages": staged(BIASED, "zb_h1", options=KERNELS),
    "fused, two losses": plan(OF_LOGITS, options=KERNELS).replace("vocab = 64", "vocab = 61 pad 4"),
    "fused, logits capped alone": plan(
        CAPPED,
        shard="batch over dp  heads, kv_heads, ffn over tp",
        options=f"{KERNELS}  precision = fp16",
    ),
    "fp16": plan(options=FP16, optimizer="adamw { lr = 1e-2  clip = 1 }"),
    "spikes": f"{plan()} watch {{ skips = 2  spikes = skip(8) }}",
    "spikes, fp16": f"{plan(options=FP16)} watch {{ skips = 2  spikes = skip(8) }}",
    "fp16, unclipped": plan(options="precision = fp16", optimizer="sgd { lr = 1e-2 }"),
    "fp16, zero 1": plan(options=FP16, state="zero 1 over dp  bucket = 12KiB"),
    "fp16, zero 3": plan(options=FP16, state="zero 3 over dp"),
    "zero 0": plan(state="zero 0 over dp  bucket = 12KiB"),
    "zero 1": plan(state="zero 1 over dp  bucket = 12KiB"),
    "zero 2, two repeats": plan(TWO, state="zero 2 over dp"),
    "zero 3": plan(state="zero 3 over dp  bucket = 12KiB  prefetch = 2"),
    "zero 1, hybrid": plan(**HYBRID, state="zero 1 over dp  bucket = 12KiB"),
    "zero 3, hybrid": plan(**HYBRID, state="zero 3 over dp"),
    "zero 1, nested": plan(NESTED, state="zero 1 over dp  bucket = 12KiB"),
    "zero 3, nested": plan(NESTED.replace("x + b", "x + dropout(b, 0.1)"), state="zero 3 over dp"),
    "zero 3, full": plan(
        options="recompute = full  gathered = regather  precision = bf16", state="zero 3 over dp"
    ),
    "zero 3, regather": plan(options="gathered = regather", state="zero 3 over dp"),
    "zero 3, two carried": plan(CARRIED, state="zero 3 over dp"),
    "zero 3, taken on": plan(TAKEN_ON, state="zero 3 over dp"),
    "zero 3, captured": plan(CAPTURED, state="zero 3 over dp"),
    "weights freed": plan(state="parameters, optimizer over dp"),
    "stages": staged(
        f"{START} {LAYERS} {TIED}", CHUNKS, options="gathered = regather", state="zero 1 over dp"
    ),
    "stages, two repeats": staged(
        SKIP, CHUNKS, "layers, blocks", options="recompute = every(2, layers)"
    ),
    "stages, one repeat whole": staged(WHOLE, "zb_h1"),
    "stages, other values": staged(
        UNLIKE, f"{CHUNKS}  stages = [2, 4, 2, 1]", "layers, blocks, rest"
    ),
    "stages, captured": staged(CAPTURED, "1f1b", options="recompute = selective(silu, attention)"),
    "stages without layers": staged(
        LLAMA, f"{CHUNKS}  stages = [2, 1, 1, 0]", options="recompute = full"
    ),
    "stages, tied on all ranks": staged(f"{START} {LAYERS} {TIED}", "1f1b", options=FP16),
    "experts": plan(
        ROUTED,
        mesh="dp = 2  cp = 2  tp = 2",
        shard="experts over cp, tp  batch over dp  seq over cp as zigzag  vocab, heads, kv_heads"
        " over tp  seq over tp",
        options="recompute = selective(dispatch)",
    ).replace("rest = 2", "experts = 8"),
    "experts of the same tokens": plan(
        ROUTED,
        shard="experts over tp  batch over dp  vocab, heads, kv_heads over tp",
        options="recompute = full",
    ).replace("rest = 2", "experts = 8"),
    "stages mixed": plan(
        state='zero 3 over dp  group norms { params = ["norm*"]  zero 1 over dp }'
    ),
}


@cache
def compiled(name: str) -> tuple[str, Program]:
    """The program of a plan, as text and as IR."""
    source = (
        Source(f"{name}.scale", SMALL[name]) if name in SMALL else load(PLANS / f"{name}.scale")
    )
    program = compile_plan(source)
    return train_py(program, source), program


def with_imports(text: str) -> str:
    """The text with all imported that tests put into it."""
    start = "from scalec.runtime import "
    called = (
        "all_gather",
        "all_gather_invariant",
        "reduce_grads_in_backward",
        "reshard",
        "unshard",
        "regather",
        "zeros",
    )
    imports = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    known = {
        alias.name for node in imports if node.module == "scalec.runtime" for alias in node.names
    }
    names = [n for n in called if n not in known]
    return text.replace(start, start + "".join(f"{name}, " for name in names))


@cache
def sound(name: str) -> tuple[str, Program]:
    """A program that is accepted, as `ast.unparse` writes it, with all imported that tests put
    into it.
    """
    text, program = compiled(name)
    text = with_imports(ast.unparse(ast.parse(text)))
    check(text, program)
    return text, program


def demand_rejected(plan: str, *pieces: str) -> None:
    """Fails unless a program with other code is refused at a line; see `replace_all`."""
    text, program = sound(plan)
    with pytest.raises(AssertionError, match=r"emit: line \d+: "):
        check(replace_all(text, *pieces), program)


def demand_accepted(plan: str, *pieces: str) -> None:
    """Fails unless a program in other words is accepted, with every op."""
    text, program = sound(plan)
    assert check(replace_all(text, *pieces), program) == len(program.ops)


def demand_refused(
    files: Mapping[str, str], program: Program, name: str, old: str, new: str
) -> None:
    """Fails unless the file `name` with `new` for `old` is refused, by its old hash in the
    program and by its own.
    """
    check_files(files)
    check(files["train.py"], program)
    assert old in files[name]
    changed = {**files, name: files[name].replace(old, new, 1)}
    with pytest.raises(
        AssertionError, match=f"emit: {name} is not the file that the program reads"
    ):
        check_files(changed)
    was, now = (sha256(each[name].encode()).hexdigest() for each in (files, changed))
    with pytest.raises(AssertionError, match=r"emit: line \d+: "):
        check(files["train.py"].replace(was, now), program)
