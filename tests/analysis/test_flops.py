"""Costs of bodies: the operations of attention are those of the pairs that its mask lets
through.
"""

from itertools import product

import pytest

from scalec.compiler.analysis.flops import Cost, cost
from scalec.compiler.ir import Program
from scalec.compiler.ops.attention import seen_pairs
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLAN = """\
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 16  hidden = 8  heads = 2  head_dim = hidden / heads  local = 4  all = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat local {
    q = x @ wq[hidden -> heads, head_dim]
    x = x + attention(q, q, q, mask=causal, window=4) @ wo[heads, head_dim -> hidden]
  }
  repeat all {
    p = x @ vq[hidden -> heads, head_dim]
    x = x + attention(p, p, p, mask=causal) @ vo[heads, head_dim -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { pp = 2 }
shard { local, all over pp }
train {
  seq = 64  global_batch = 4  microbatch = 2  steps = 3
  optimizer sgd { lr = 0.1 }
  data text { files = [python_stdlib] }
}
"""


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_those_of_the_mask(causal: bool) -> None:
    for size, window in product(range(1, 18), range(0, 21)):
        mask = [
            (query, key)
            for query, key in product(range(size), repeat=2)
            if (key <= query or not causal) and (abs(query - key) < window or not window)
        ]
        assert seen_pairs(size, causal, window) == len(mask), (size, window)


def compiled(attention: str, until: str = "resolve") -> Program:
    """The plan with this mask in its first layers."""
    text = PLAN.replace("mask=causal, window=4", attention, 1)
    if "full" in attention:
        text = text.replace("labels[batch, seq])", "labels[batch, seq]) bidirectional", 1)
    if "documents" in attention:
        text = text.replace("labels[batch, seq])", "labels[batch, seq], documents[batch, seq])", 1)
        text = text.replace("data text {", "data text { separator = 0 ", 1)
    return compile_plan(Source("plan.scale", text), until)


def of_attention(mask: str) -> Cost:
    """What the first attention costs."""
    program = compiled(mask)
    op = next(op for op in program.ops if op.kind == "attention")
    return cost(program, [op])


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        ("mask=full", 64 * 64),
        ("mask=causal", 64 * 65 // 2),
        ("mask=causal, window=4", 1 + 2 + 3 + 61 * 4),
        ("mask=full, window=4", 2 * (1 + 2 + 3 + 61 * 4) - 64),
        ("mask=causal, window=100", 64 * 65 // 2),
        ("documents=documents, mask=causal", 64 * 65 // 2),  # at most
    ],
)
def test_attention_costs_what_its_mask_lets_through(mask: str, pairs: int) -> None:
    """Two products of batch 2, 2 heads of 4, and four in backward."""
    forward = 2 * 2 * (2 * 2 * 4) * pairs
    assert of_attention(mask) == Cost(forward, 2 * forward)


def test_stages_are_balanced_by_what_masks_let_through() -> None:
    """Layers that see a window are cheaper, and so a stage has more of them."""
    layers = {
        mask: compiled(mask, "divide_stages").pipeline
        for mask in ("mask=full", "mask=causal, window=4")
    }
    assert [it.layers for it in layers.values() if it] == [(3, 3), (4, 2)]
