"""A model of which other values cross at some cuts than at others: number, sizes and placements.
No tests.

`layers` carries two values, their sequence over tp; `blocks` one, its features over tp; `rest` one,
whose features are others and whole.  Documents are read in `layers` alone.
"""

from helpers.oracle.plans import ROWS, SEQ, Case

MODEL = """
  x = embedding(tokens, wte[vocab, hidden])
  s = silu(x)
  repeat layers {
    a = rmsnorm(x, norm1[hidden], 1e-5)
    k = a @ wk[hidden -> heads, head_dim]
    o = attention(a @ wq[hidden -> heads, head_dim], k, k, mask=causal, documents=documents)
    x = x * s + o @ wo[heads, head_dim -> hidden]
  }
  y = (x + s) @ w_up[hidden -> ffn]
  repeat blocks { y = y * tanh(y * gate[ffn]) }
  z = silu(y) @ w_down[ffn -> narrow]
  repeat rest { z = z + tanh(z * scale[narrow]) }
  loss = cross_entropy(z @ head[narrow -> vocab], labels)
"""

WHOLE = Case(microbatches=4)
STAGED = Case(pp=2, tp=2, sp=True, microbatches=4)
CHUNKS = "interleaved_1f1b(chunks=4)  stages = [1, 1, 1, 1, 1, 1, 1, 0]"


def unlike(schedule: str = CHUNKS, options: str = "", case: Case = STAGED) -> str:
    """The plan's text: on one device, or in stages on a mesh."""
    mesh = "pp = 2  tp = 2" if case.pp > 1 else ""
    rules = (
        "vocab, heads, ffn over tp  seq over tp  layers, blocks, rest over pp"
        if case.pp > 1
        else ""
    )
    return f"""model unlike(tokens[batch, seq], labels[batch, seq], documents[batch, seq]) {{
  dims {{ vocab = 32  hidden = 16  heads = 4  head_dim = 4  ffn = 24  narrow = 6  layers = 3  blocks = 2  rest = 2 }}
  init ~ normal(0.02) {MODEL}}}
mesh  {{ {mesh} }}
shard {{ {rules} }}
{f"pipeline {{ schedule = {schedule} }}" if case.pp > 1 else ""}
train {{
  seq = {SEQ}  global_batch = {case.rows}  microbatch = {ROWS}  steps = 2  precision = fp64  {options}
  optimizer sgd {{ lr = 0.1 }}  data text {{ files = [python_stdlib]  separator = "\\n" }}
}}
"""
