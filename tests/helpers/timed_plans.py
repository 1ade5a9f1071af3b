"""Small plans of all kinds whose time is known by hand, and hardware for them."""

import pytest

from scalec.compiler.analysis.hardware import Hardware
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

WASTEFUL = "mesh { dp = 64  tp = 8 }  state { zero 1 over dp }  train { recompute = full }"
"""Sections over those of the shipped plan of Llama 3 70B that make it a slow one: there is
advice to give.
"""

HARDWARE = Hardware(
    "any",
    peak={"bf16": 1e12, "f16": 1e12, "f32": 5e11, "f64": 1e11},
    memory=1e11,
    sms=8,
    held={"bf16": 0.7},
    attention=0.4,
    link=1e10,
    network=1e10,
    ranks_per_node=4,
)

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS, SEQ, BATCH, STEPS = (
    64,
    96,
    8,
    4,
    8,
    128,
    4,
    32,
    8,
    2,
)

MODEL = f"""model tiny(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = {VOCAB}  hidden = {HIDDEN}  heads = {HEADS}  kv_heads = {KV_HEADS}  head_dim = {HEAD_DIM}
         ffn = {FFN}  layers = {LAYERS} }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    a = rmsnorm(x, norm[hidden], 1e-6)
    q = a @ wq[hidden -> heads, head_dim]
    k = a @ wk[hidden -> kv_heads, head_dim]
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
    x = x + silu(x @ up[hidden -> ffn]) @ down[ffn -> hidden]
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
"""


def compiled(
    mesh: str = "",
    shard: str = "",
    rest: str = "",
    train: str = "",
    microbatch: int = 1,
    layers: int = LAYERS,
    optimizer: str = "adamw { lr = 0.1 }",
) -> Program:
    text = MODEL.replace(f"layers = {LAYERS} ", f"layers = {layers} ")
    text += (f"mesh {{ {mesh} }}\nshard {{\n{shard}\n}}\n" if mesh else "") + rest
    text += f"""
train {{
  seq = {SEQ}  global_batch = {BATCH}  microbatch = {microbatch}  steps = {STEPS}  precision = bf16  {train}
  optimizer {optimizer}
  data text {{ files = ["a"] }}
}}
"""
    return compile_plan(Source("tiny.scale", text))


EXPERTS = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 128  hidden = 64  experts = 8  expert_ffn = 32  layers = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    y = x
    route y to experts by top(y @ router[hidden -> experts], 2) {
      y = silu(y @ up[hidden -> expert_ffn]) @ down[expert_ffn -> hidden]
    }
    x = x + y
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { ep = 4 }
shard {
  experts over ep
  batch over ep
}
train {
  seq = 32  global_batch = 8  microbatch = 1  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = ["a"] }
}
"""


PROGRAMS = {
    "one rank": compiled(),
    "tp": compiled(
        "dp = 2  tp = 2", "batch over dp\nvocab, heads, kv_heads, ffn over tp\nseq over tp"
    ),
    "zero 3": compiled("dp = 4", "batch over dp", "state { zero 3 over dp }"),
    "zero 3, far ahead": compiled(
        "dp = 2", "batch over dp", "state { zero 3 over dp  prefetch = 2 }", layers=11
    ),
    "zero 1, recomputed": compiled(
        "dp = 4", "batch over dp", "state { zero 1 over dp }", "recompute = full"
    ),
    "ring": compiled("cp = 4", "seq over cp as zigzag via ring"),
    "pipeline": compiled(
        "pp = 2  dp = 2",
        "batch over dp\nlayers over pp",
        "pipeline { schedule = interleaved_1f1b(chunks=2) }",
    ),
    "pipeline, zero 2": compiled(
        "pp = 2  dp = 4",
        "batch over dp\nlayers over pp",
        "state { zero 2 over dp }\npipeline { schedule = interleaved_1f1b(chunks=2) }",
    ),
    "zero bubble": compiled("pp = 2", "layers over pp", "pipeline { schedule = zb_h1 }"),
    "experts": compile_plan(Source("tiny.scale", EXPERTS)),
}


several = pytest.mark.parametrize("name", PROGRAMS)
