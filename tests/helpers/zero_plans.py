"""A small plan whose turns have buckets of their own, under any stage of sharing; sizes that
leave no padding.
"""

from math import prod

from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

LAYERS, HIDDEN, VOCAB = 5, 8, 16
TURN = 2 * HIDDEN * HIDDEN  # elements of a layer's two matrices
ALL = LAYERS * TURN
REST = 2 * VOCAB * HIDDEN  # of embedding and head

PLAN = f"""model tiny(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = {VOCAB}  hidden = {HIDDEN}  ffn = {HIDDEN}  layers = {LAYERS} }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    x = x + silu(x @ up[hidden -> ffn]) @ down[ffn -> hidden]
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
mesh {{ MESH }}
shard {{ batch over DATA }}
state {{ STATE  bucket = 1KiB }}
train {{
  seq = 4  global_batch = BATCH  microbatch = 1  steps = 1
  optimizer sgd {{ lr = 0.1 }}
  data text {{ files = ["a"] }}
}}
"""


def plan_text(state: str, microbatches: int = 3, mesh: str = "dp = 2") -> str:
    """The plan on a mesh, all of whose axes carry data."""
    axes, sizes = mesh.replace("=", "").split()[::2], map(int, mesh.split()[2::3])
    batch = prod(sizes) * microbatches
    text = PLAN
    for name, value in (
        ("MESH", mesh),
        ("DATA", ", ".join(axes)),
        ("STATE", state),
        ("BATCH", str(batch)),
    ):
        text = text.replace(name, value)
    return text


def compiled(text: str) -> Program:
    return compile_plan(Source("tiny.scale", text))


def program(state: str, microbatches: int = 3, mesh: str = "dp = 2") -> Program:
    return compiled(plan_text(state, microbatches, mesh))
