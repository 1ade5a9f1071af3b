"""Words of other programs in a small plan: each help, letter for letter, is in
tests/golden/wishes.txt.
"""

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from scalec.compiler.frontend import other_names, resolve
from scalec.compiler.ops import OPS
from scalec.compiler.syntax import synonyms
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLAN = """\
model small(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  heads = 4  head_dim = hidden / heads  ffn = 48  layers = 2 }
  const { eps = 1e-5  theta = 10000 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    a = rmsnorm(x, norm1[hidden], eps)
    q = rope(a @ wq[hidden -> heads, head_dim], theta)
    k = rope(a @ wk[hidden -> heads, head_dim], theta)
    v = a @ wv[hidden -> heads, head_dim]
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
    x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ wte, labels)
}
mesh { dp = 2  tp = 2 }
shard { batch over dp  vocab, heads, ffn over tp }
train {
  seq = 16  global_batch = 8  microbatch = 2  steps = 3
  optimizer adamw { lr = 1e-3  schedule = cosine(warmup=1) }
  data text { files = [python_stdlib] }
}
"""
ATTENTION = "attention(q, k, v, mask=causal)"
NORM = "rmsnorm(x, norm1[hidden], eps)"
MESH = "mesh { dp = 2  tp = 2 }"

EDITS = (
    *(
        (ATTENTION, f"attention(q, k, v, mask={mask})")
        for mask in ("alibi", "casual", "prefix", "sliding_window")
    ),
    (ATTENTION, "attention(q, k, v, mask=causal, bias=b[heads])"),
    (ATTENTION, "attention(q, k, v, mask=causal, sinks=s[heads])"),
    (ATTENTION, "attention(q, k, v, mask=causal, softmax_scale=0.1)"),
    (ATTENTION, "flash_attn_func(q, k, v)"),
    (NORM, "rmsnorm(x, eps)"),
    (NORM, "rmsnorm(x)"),
    *(
        (NORM, f"{op}(x)")
        for op in ("sqrt", "cumsum", "log", "max", "detach", "mean", "norm", "pad", "lora")
    ),
    (NORM, "linear(hidden, ffn)"),
    ("silu(x", "swish(x"),
    ("lr = 1e-3", "lr = 0"),
    ("warmup=1", "warmup=0.1"),
    ("lr = 1e-3", "lr = 1e-3  schedule = cosine(floor=10%)"),
    ("heads = 4", "heads = 5"),
    (MESH, "mesh [dp=2]"),
    (MESH, "device_mesh { dp = 2  tp = 2 }"),
    ("optimizer adamw", "optimizer adam"),
    ("data text { files = [python_stdlib] }", 'data jsonl { files = ["a.jsonl"] }'),
    ("[python_stdlib]", '[python_stdlib]  tokenizer = "gpt2"'),
    *(
        ("steps = 3", f"steps = 3  {setting}")
        for setting in (
            "zero_stage = 3",
            "ddp = on",
            "gradient_accumulation = 4",
            "activation_checkpointing = full",
            "recompute = on",
            "flash_attention = on",
            "amp = bf16",
            "fp8 = on",
            "cpu_offload = on",
            "sequence_parallel = on",
            "context_parallel_size = 2",
            "freeze = 1",
            "report_to = wandb",
            "precision = mixed",
        )
    ),
    *(
        (MESH, f"{MESH} {section}")
        for section in (
            "fsdp { }",
            "ddp { }",
            "zero_optimization { stage = 3 }",
            "activation_checkpointing { }",
            "optimizer adamw { lr = 1e-3 }",
            "training { }",
            "strategy { }",
            "generate { }",
            "state { fsdp over dp }",
            "experimental { }",
        )
    ),
)
"""What is written in the plan, and what somebody writes in its place who comes from another
program.
"""


def helps(old: str, new: str) -> str:
    """The place of each mistake of an edited plan, with its code, and its help."""
    assert old in PLAN
    with pytest.raises(PlanError) as error:
        compile_plan(Source("small.scale", PLAN.replace(old, new, 1)))
    mistakes = error.value.diagnostics
    return "\n".join(
        f"{mistake.code} {mistake.span.words}\n  {mistake.help}" for mistake in mistakes
    )


def test_the_helps(golden: Callable[[str, str], None]) -> None:
    golden("wishes.txt", "\n".join(helps(old, new) for old, new in EDITS) + "\n")


def test_an_op_that_needs_a_dim_whole_is_told_of_positions(tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text("def scan(x):\n    return x\n")
    op = 'op scan(x[.., s, d]) -> [.., s, d] over .., d causal s from "my_ops:scan"\n'
    text = op + PLAN.replace(NORM, f"scan({NORM})").replace(
        "ffn over tp }", "ffn over tp  seq over tp }"
    )
    with pytest.raises(PlanError) as error:
        compile_plan(Source(str(tmp_path / "small.scale"), text))
    (mistake,) = error.value.diagnostics
    assert mistake.code == "E0601"
    assert "name that dim after `over`" in mistake.help
    assert "`at=DIM`" in mistake.help


def every_help() -> list[str]:
    """All helps of all tables, with a name in the place of the plan's."""
    tables = (
        other_names._OPS,  # pyright: ignore[reportPrivateUsage]
        other_names._ARGUMENTS,  # pyright: ignore[reportPrivateUsage]
        other_names._ATTENTION_ARGUMENTS,  # pyright: ignore[reportPrivateUsage]
        other_names._CHOICES,  # pyright: ignore[reportPrivateUsage]
    )
    settings = (
        synonyms._ELSEWHERE,  # pyright: ignore[reportPrivateUsage]
        synonyms._SECTIONS,  # pyright: ignore[reportPrivateUsage]
    )
    values = chain.from_iterable(table.values() for table in tables)
    return [*(help.replace("{name}", "own") for help in values), *chain.from_iterable(settings)]


def test_each_op_that_a_help_declares_is_one(tmp_path: Path) -> None:
    declared = {op for help in every_help() for op in re.findall(r"`(op [a-z]\S*\(.*?\")`", help)}
    assert len(declared) >= 7
    for op in declared:
        name = op.split('"')[1].removeprefix("my_ops:")
        operands = ", ".join(re.findall(r"(\w+)(?:\[|=)", op.partition("->")[0]))
        (tmp_path / "my_ops.py").write_text(f"def {name}({operands}):\n    return {operands[0]}\n")
        resolve(Source(str(tmp_path / "small.scale"), f"{op}\n{PLAN}"))


def test_each_section_that_a_help_writes_can_be_parsed() -> None:
    section = r"`((?:mesh|shard|state|pipeline|dims|cluster) \{[^…`]*\})`"
    written = {text for help in every_help() for text in re.findall(section, help)}
    assert len(written) >= 8
    for text in written:
        parse_plan(Source("small.scale", text))


STATEMENTS = {
    "attention": "y = attention(q, k, v, mask=causal) @ w9[heads, head_dim -> hidden]",
    "concat": "y = concat(x, y, as=both) @ w9[both -> hidden]",
    "cross_entropy": (
        "logits = x @ w9[hidden -> vocab]  loss = loss + cross_entropy(logits, labels)"
    ),
    "embedding": "y = embedding(tokens, wte[vocab, hidden])",
    "mean": "y = x * mean(x, over=hidden)",
    "rope": "y = rope(q, theta) @ w9[heads, head_dim -> hidden]",
    "split": "y, z = split(x, [left, right])  y = y @ w9[left -> hidden] + z @ w8[right -> hidden]",
    "sum": "y = x * sum(x, over=hidden)",
}
"""Statements that hold an example where it is not a value of the residual stream."""


@pytest.mark.parametrize("op", other_names.EXAMPLES)
def test_each_example_of_an_op_is_one(op: str) -> None:
    example = other_names.EXAMPLES[op]
    statement = STATEMENTS.get(op, f"y = {example}")
    assert example in statement
    text = f"""
    model all(tokens[batch, seq], labels[batch, seq]) {{
      dims {{ vocab = 64  hidden = 32  heads = 4  head_dim = 8  left = 20  right = 12  both = 2 * hidden }}
      const {{ eps = 1e-5  theta = 10000 }}
      init ~ normal(0.02)
      x = embedding(tokens, wte[vocab, hidden])
      y = tanh(x)
      q = x @ wq[hidden -> heads, head_dim]
      k = x @ wk[hidden -> heads, head_dim]
      v = x @ wv[hidden -> heads, head_dim]
      z = attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
      loss = cross_entropy((x + y + z) @ wte, labels)
      {statement}
      loss = loss + cross_entropy((x + y) @ head[hidden -> vocab], labels)
    }}
    {PLAN[PLAN.index("train {") :]}
    """
    text = re.sub(r"wte\[vocab, hidden\]\)(?=\n      loss)", "wte)", text)
    resolve(Source("all.scale", text))


def test_an_op_of_the_language_is_not_among_those_that_it_lacks() -> None:
    assert [
        name for name, op in OPS.items() if op.user_visible and other_names.is_foreign_op(name)
    ] == []
