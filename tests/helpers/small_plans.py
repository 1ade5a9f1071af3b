"""Small plans for the tests of the IR."""

import re
from functools import cache

from attrs import frozen

from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower

DIMS = (
    "vocab = 12  hidden = 4  heads = 4  kv_heads = 2  head_dim = 2  ffn = 8  layers = 2  blocks = 2"
)

ATTENTION = """
    a = rmsnorm(x, norm1[hidden], eps)
    q = rope(a @ wq[hidden -> heads, head_dim], theta)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], theta)
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]"""
MLP = """
    m = rmsnorm(x, norm2[hidden], eps)
    x = x + (silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn])) @ w_down[ffn -> hidden]"""
HEAD = "loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ head[hidden -> vocab], labels)"
START = "x = embedding(tokens, wte[vocab, hidden])"
LLAMA = f"{START} repeat layers {{ {ATTENTION} {MLP} }} {HEAD}"
PARALLEL_BLOCK = f"""{START}
  repeat layers {{
    a = rmsnorm(x, norm1[hidden], eps)
    q = rope(a @ wq[hidden -> heads, head_dim], theta)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], theta)
    o = attention(q, k, a @ wv[hidden -> kv_heads, head_dim], mask=causal) @ wo[heads, head_dim -> hidden]
    x = x + o + silu(a @ w_up[hidden -> ffn]) @ w_down[ffn -> hidden]
  }}
  {HEAD}"""

ALL_OVER_TP = "batch over dp  vocab, heads, kv_heads, ffn over tp"
WITH_SEQ = f"{ALL_OVER_TP}  seq over tp"


@frozen
class Plan:
    """A plan in pieces; `microbatch` counts sequences on all data-parallel ranks together.

    `shard` has two spaces between rules; dims that the model lacks are left out of them.
    """

    body: str = LLAMA
    mesh: str = ""
    shard: str = ""
    ranks: int = 1
    """Data-parallel ranks: the product of the axes over which `batch` lies."""
    microbatches: int = 2
    microbatch: int = 4
    seq: int = 4
    train: str = "precision = fp64"
    clip: float = 0.0
    dims: str = DIMS
    inputs: str = ""
    """The inputs after tokens and labels."""
    word: str = ""
    """The word after the inputs: `bidirectional`, or none."""
    state: str = ""
    data: str = ""
    """Settings of the data besides its files."""

    def text(self) -> str:
        """The plan as a person would write it."""
        sees = f"{self.word} " if self.word else ""
        return f"""model tiny(tokens[batch, seq], labels[batch, seq]{self.inputs}) {sees}{{
  dims {{ {self.dims} }}
  const {{ eps = 1e-5  theta = 10000 }}
  init ~ normal(0.02)
  {self.body}
}}
mesh {{ {self.mesh} }}
shard {{ {self._rules()} }}
state {{ {self.state} }}
train {{
  seq = {self.seq}  global_batch = {self.microbatches * self.microbatch}  microbatch = {self.microbatch // self.ranks}
  steps = 1  {self.train}
  optimizer sgd {{ lr = 0.5  clip = {self.clip} }}
  data text {{ files = [python_stdlib] {self.data} }}
}}
"""

    def _rules(self) -> str:
        rules: list[str] = []
        for rule in filter(None, self.shard.split("  ")):
            dims, _, axes = rule.partition(" over ")
            used = [
                dim
                for dim in dims.split(", ")
                if dim in ("batch", "seq") or re.search(rf"\b{dim}\b", self.body)
            ]
            rules += [f"{', '.join(used)} over {axes}"] if used else []
        return "  ".join(rules)

    def program(self, until: str = PASS_NAMES[-1]) -> Program:
        """The plan after a pass."""
        return _program(self.text(), until)


@cache
def _program(text: str, until: str) -> Program:
    source, first = Source("tiny.scale", text), PASS_NAMES[0]
    return compile_plan(source, first) if until == first else lower(_program(text, first), until)
