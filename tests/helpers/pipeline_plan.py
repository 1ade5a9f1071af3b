"""A small plan in stages, and what tests write in place of parts of it."""

from collections.abc import Mapping

from helpers.edited_text import replace_once
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLAN = """\
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  ffn = 48  layers = 6  rest = 2  inner = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { pp = 4  dp = 2 }
shard { batch over dp  layers over pp }
pipeline { schedule = 1f1b }
train {
  seq = 16  global_batch = 24  microbatch = 2  steps = 3
  optimizer adamw { lr = 1e-3 }
  data text { files = [python_stdlib] }
}
"""


def compiled(
    edits: Mapping[str, str], until: str = "schedule_pipeline", path: str = "plan.scale"
) -> Program:
    """The program of the edited plan."""
    return compile_plan(Source(path, replace_once(PLAN, edits)), until)
