"""Mistakes in names, dims, sharding and groups: each gets its code, at the words that are wrong.

Each case edits a plan that compiles, so without its check the plan would compile or fall over.
"""

from collections.abc import Callable

import pytest

from scalec.compiler.syntax.codes import get_codes
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source, Span
from scalec.compiler.tuning.lowering import compile_plan

PLAN = """\
model llama(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  heads = 4  kv_heads = 2  head_dim = hidden / heads  ffn = 48  layers = 2 }
  const { theta = 10000 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    a = rmsnorm(x, norm1[hidden], 1e-5)
    q = rope(a @ wq[hidden -> heads, head_dim], theta)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], theta)
    x = x + attention(q, k, a @ wv[hidden -> kv_heads, head_dim], mask=causal) @ wo[heads, head_dim -> hidden]
    x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(rmsnorm(x, norm[hidden], 1e-5) @ head[hidden -> vocab], labels)
}
cluster { gpus_per_node = 4  nodes = 1 }
mesh  { dp = 2  tp = 2 }
shard { batch over dp  vocab, heads, kv_heads, ffn over tp  seq over tp }
train {
  seq = 16  global_batch = 8  microbatch = 2  steps = 3
  optimizer adamw { lr = 1e-3 }
  data text { files = [python_stdlib] }
}
"""

GROUPS = "lr = 1e-3  group a {{ params = [{}] }}  group b {{ params = [{}] }}"
STATE_GROUPS = "state {{ group a {{ params = [{}] }}  group b {{ params = [{}] }} }}\ntrain {{"

# what is written instead of what, the code, the words that are marked ("" where the whole line
# would do)
CASES = [
    ("rmsnorm(x, norm1", "rmsnorm(y, norm1", "E0201", "y"),
    ("loss =", "other =", "E0206", "llama"),
    ("q = rope", "wte = rope", "E0207", "wte"),
    ("w_in[hidden", "wq[hidden", "E0208", "wq[hidden -> ffn]"),
    ("head[hidden -> vocab]", "wq", "E0209", "wq"),
    ("  init ~ normal(0.02)\n", "", "E0210", "wte[vocab, hidden]"),
    ("normal(0.02)", "cauchy(1)", "E0211", "cauchy(1)"),
    ("  loss =", "  y = silu(x)\n  loss =", "E0212", "silu(x)"),
    (
        "tokens[batch, seq], labels[batch, seq]",
        "labels[batch, seq], tokens[batch, seq]",
        "E0213",
        "",
    ),
    ("  loss = c", "  c = c", "E0206", "llama"),
    (
        "head[hidden -> vocab], labels)",
        "head[hidden -> vocab], labels)\n  loss = loss * loss",
        "E0214",
        "loss * loss",
    ),
    ("a = rms", "_a = rms", "E0215", "_a"),
    ("wte[vocab, hidden])", "wte[vocab, hidden]) + p[batch, hidden]", "E0216", "batch"),
    ("head_dim = hidden / heads", "head_dim = hidden / 5", "E0303", "hidden / 5"),
    ("ffn = 48", "ffn = 0", "E0304", "0"),
    ("a @ wq[hidden -> heads", "a @ wq[ffn -> heads", "E0306", ""),
    ("global_batch = 8", "global_batch = 6", "E0310", "global_batch = 6"),
    ("heads = 4  kv", "heads = 8  kv_heads = 6  x", "E0311", ""),
    ("head_dim = hidden / heads", "head_dim = 3", "E0312", ""),
    ("theta = 10000", "theta = 0", "E0313", ""),
    ("labels)\n}", "labels, smoothing=1)\n}", "E0313", ""),
    ("labels)\n}", "labels, smoothing=-0.1)\n}", "E0313", ""),
    ("labels)\n}", "labels, z=-1e-4)\n}", "E0313", ""),
    (
        "labels[batch, seq]",
        "labels[batch, seq], documents[batch, seq]",
        "E0212",
        "documents[batch, seq]",
    ),
    ("labels[batch, seq]", "labels[batch, seq], mask[batch, seq]", "E0213", ""),
    ("[python_stdlib]", "[python_stdlib]  separator = 10", "E0409", "separator = 10"),
    (
        "steps = 3",
        "steps = 3  recompute = selective(atention)",
        "E0410",
        "recompute = selective(atention)",
    ),
    ("steps = 3", "steps = 3  recompute = selective()", "E0404", "selective()"),
    ("steps = 3", "steps = 3  recompute = most", "E0404", "most"),
    ("steps = 3", "steps = 3  master = fp16", "E0404", "fp16"),
    ("steps = 3", "steps = 3  master = bf16", "E0411", "master = bf16"),
    ("steps = 3", "steps = 3  precision = fp64  master = fp32", "E0411", "master = fp32"),
    (
        "steps = 3",
        "steps = 3  reduce = fp32  precision = bf16  master = bf16",
        "E0411",
        "reduce = fp32",
    ),
    ("steps = 3", "steps = 3  reduce = fp16  precision = bf16", "E0411", "reduce = fp16"),
    ("[python_stdlib]", "[python_stdlib]  masked = 15%", "E0402", "masked = 15%"),
    ("[python_stdlib]", "[python_stdlib]  mask_token = 1", "E0402", "mask_token = 1"),
    (
        "[python_stdlib]",
        "[python_stdlib]  masked = 15%  mask_token = 64",
        "E0405",
        "mask_token = 64",
    ),
    (
        "text { files = [",
        'tokens { masked = 15%  mask_token = "1"  files = [',
        "E0404",
        'mask_token = "1"',
    ),
    ("mask=causal", "mask=causal, documents=labels", "E0607", "labels"),
    ("lr = 1e-3", GROUPS.format('"none*"', '"wq"'), "E0407", 'params = ["none*"]'),
    ("lr = 1e-3", GROUPS.format('"w*"', '"wq"'), "E0408", 'params = ["wq"]'),
    ("batch over dp", "bacth over dp", "E0503", "bacth"),
    ("ffn over tp", "ffn over pt", "E0504", "pt"),
    ("ffn over tp", "ffn, hidden over tp", "E0505", "hidden"),
    ("batch over dp", "batch over tp, dp", "E0507", "batch"),
    ("seq over tp", "seq over dp", "E0508", "seq"),
    ("tp = 2 }", "tp = 2  cp = 2 }", "E0509", "cp = 2"),
    ("ffn = 48", "ffn = 47", "E0510", "ffn"),
    ("gpus_per_node = 4  nodes = 1", "gpus_per_node = 1  nodes = 4", "E0511", ""),
    ("nodes = 1", "nodes = 2", "E0512", ""),
    ("gpus_per_node = 4  nodes = 1", "gpus_per_node = 8  nodes = 1", "E0512", "nodes = 1"),
    ("gpus_per_node = 4  nodes = 1", "nodes = 3", "E0512", "nodes = 3"),
    ("gpus_per_node = 4  nodes = 1", "nodes = 4", "E0511", ""),
    ("seq over tp }", "seq over tp  layers over dp }", "E0513", "batch"),
    ("train {", "pipeline { schedule = 1f1b }\ntrain {", "E0517", "pipeline"),
    ("train {", "state { weights over dp }\ntrain {", "E0514", "weights"),
    ("train {", "state { optimizer over sp }\ntrain {", "E0504", "sp"),
    ("seq over tp }", "}\nstate { zero 1 over tp }", "E0515", "tp"),
    ("train {", "state { gradients over dp }\ntrain {", "E0516", "gradients over dp"),
    (
        "train {",
        'state { group a { params = ["nrm*"]  zero 1 over dp } }\ntrain {',
        "E0407",
        'params = ["nrm*"]',
    ),
    ("train {", STATE_GROUPS.format('"norm*"', '"norm"'), "E0408", 'params = ["norm"]'),
    ("train {", 'state { group a { params = ["wq"]  bucket = 1MiB } }\ntrain {', "E0401", "bucket"),
    ("train {", "state { group a { zero 1 over dp } }\ntrain {", "E0402", "group a"),
    ("train {", "state { part a { zero 1 over dp } }\ntrain {", "E0406", "part a"),
    ("train {", "state { group a { params = norm } }\ntrain {", "E0404", "norm"),
    ("train {", "state { zero 4 over dp }\ntrain {", "E0406", "zero 4"),
    ("train {", "state { zero over dp }\ntrain {", "E0514", "zero"),
    ("train {", "state { zero 1 over dp, dp }\ntrain {", "E0403", "dp"),
    ("train {", "state { zero 1 over dp  optimizer over dp }\ntrain {", "E0403", "optimizer"),
    ("train {", "state { zero 1 over dp  bucket = 25MB }\ntrain {", "E0404", "25MB"),
    ("train {", "state { zero 3 over dp  prefetch = -1 }\ntrain {", "E0405", "-1"),
    ("train {", "state { zero 3 over dp  ahead = 1 }\ntrain {", "E0401", "ahead"),
    ("vocab, heads, kv_heads, ffn over tp", "vocab, head_dim, ffn over tp", "E0601", ""),
    ("seq over tp", "seq over tp as zigzga", "E0518", "zigzga"),
    ("seq over tp", "seq over tp via rings", "E0518", "rings"),
    ("batch over dp", "batch over dp as zigzag", "E0518", "zigzag"),
    ("seq over tp", "seq over tp as zigzag via ulysses", "E0518", "zigzag"),
    ("dp = 2", "dp = 2..1", "E0520", "2..1"),
    ("dp = 2", "dp = 0..2", "E0501", "0..2"),
    ("dp = 2", "dp = 1..2GiB", "E0501", "1..2GiB"),
    ("dp = 2  tp = 2", "dp = 1..2  tp = 1..2", "E0520", "tp = 1..2"),
    ("tp = 2", "tp = 1..2", "E0520", "vocab"),
    ("dp = 2  tp = 2", "dp = 5..7  tp = 2", "E0310", "global_batch = 8"),
    ("seq = 16 ", "seq = 4..16 ", "E0404", "4..16"),
    ("hidden = 32", "hidden = 16..32", "E0301", "16..32"),
    ("mask=causal", "mask=1..2", "E0608", ""),
    ("x = embedding", "x = embeding", "E0605", "embeding"),
    ("norm1[hidden], 1e-5", "norm1[hidden]", "E0606", "rmsnorm(x, norm1[hidden])"),
    ("embedding(tokens", "embedding(labels", "E0607", "labels"),
    ("    x = x + attention", "    tokens = labels\n    x = x + attention", "E0607", "tokens"),
    ("mask=causal", "mask=casual", "E0608", "casual"),
    ("vocab, heads, kv_heads, ffn", "vocab, heads, ffn", "E0609", ""),
]


LAST = "    x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]"
# what is written as elsewhere, instead of what; messages, letter for letter:
# tests/golden/mistakes.txt
ELSEWHERE = [
    ("w_in[hidden -> ffn]", "w_in[hidden, ffn]"),
    ("w_in[hidden -> ffn]", "w_in[ffn -> hidden]"),
    ("w_in[hidden -> ffn]", "w_in(hidden, ffn)"),
    ("w_in[hidden -> ffn]", "w_in"),
    ("w_in[hidden -> ffn]", "w_in[hidden -> hidden]"),
    (LAST, "    x = x + softmax(q @ k)"),
    (LAST, "    x = x * (x @ a)"),
    (LAST, "    x = 1 / x"),
    (LAST, "    x = x / 0"),
    (LAST, "    x = linear(x, w)"),
    (LAST, "    x = RMSNorm(x)"),
    (LAST, "    x = swish(x)"),
    (LAST, "    x = mlp(x)"),
    (LAST, "    x = softmax(x, dim=-1)"),
    (LAST, "    x = softmax(x, -1)"),
    (LAST, "    if layers < 2 { x = a }"),
    ("norm1[hidden], 1e-5", "norm1[hidden]"),
    ("norm1[hidden], 1e-5", "norm1[hidden], None"),
    ("norm1[hidden], 1e-5", "norm1[hidden], epsilon=1e-5"),
    ("norm1[hidden], 1e-5", "norm1[hidden], 1e-5, eps=1e-5"),
    ("norm1[hidden], 1e-5", "norm1[hidden], 1e-5, 2"),
    (", mask=causal", ""),
    ("mask=causal", "mask=None"),
    ("mask=causal", "is_causal=True"),
    ("labels)\n}", "labels, ignore_index=-100)\n}"),
    ("(tokens, wte", "(inputs, wte"),
    ("(tokens, wte[vocab, hidden])", "(wte[vocab, hidden], tokens)"),
    ("+ attention", "+ positions + attention"),
    ("normal(0.02)", "normal(std=0.02)"),
    ("  repeat layers {", "  while layers {"),
    ("model llama", "dims { vocab = 64 }\nmodel llama"),
]


def marked(span: Span) -> str:
    """The words of the plan that a span covers."""
    line = span.text.split("\n")[span.line - 1]
    return line[span.column - 1 : span.end_column - 1]


def test_the_plan_itself_compiles() -> None:
    compile_plan(Source("plan.scale", PLAN))


@pytest.mark.parametrize(
    ("before", "after", "code", "words"), CASES, ids=[f"{c[2]} {c[1][:24]!r}" for c in CASES]
)
def test_each_mistake_has_its_code_and_its_place(
    before: str, after: str, code: str, words: str
) -> None:
    assert before in PLAN
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("plan.scale", PLAN.replace(before, after, 1)))
    found = {diagnostic.code: diagnostic for diagnostic in reversed(caught.value.diagnostics)}
    assert code in found, str(caught.value)
    assert code in get_codes()
    assert not words or marked(found[code].span) == words


def test_what_is_written_as_elsewhere(golden: Callable[[str, str], None]) -> None:
    told: list[str] = []
    for before, after in ELSEWHERE:
        assert before in PLAN
        with pytest.raises(PlanError) as caught:
            compile_plan(Source("plan.scale", PLAN.replace(before, after, 1)))
        told += [f"{caught.value}\n"]
    golden("mistakes.txt", "\n".join(told))


def test_documents_need_a_separator() -> None:
    """And both places are shown."""
    text = PLAN.replace("labels[batch, seq])", "labels[batch, seq], documents[batch, seq])")
    text = text.replace("mask=causal", "mask=causal, documents=documents")
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("plan.scale", text))
    (found,) = caught.value.diagnostics
    assert found.span
    assert (found.code, marked(found.span)) == ("E0402", "data text")
    assert [note.span and marked(note.span) for note in found.notes] == ["documents[batch, seq]"]
    assert "separator" in found.help
    compile_plan(
        Source("plan.scale", text.replace("[python_stdlib]", "[python_stdlib]  separator = 10"))
    )


def test_rope_turns_an_even_part_of_an_odd_number_of_dims() -> None:
    text = PLAN.replace("head_dim = hidden / heads", "head_dim = 9").replace(
        "theta)", "theta, dims=8)"
    )
    compile_plan(Source("plan.scale", text))


HELPS = {
    "give it as an input": (
        "mask=causal",
        "mask=causal, documents=documents",
        "add `documents[batch, seq]` to",
    ),
    "a share": ("theta = 10000", "theta = 10000  p = 10%", "10% is 0.1 here"),
    "a token for what is hidden": (
        "[python_stdlib]",
        "[python_stdlib]  masked = 15%",
        "name the token that",
    ),
    "a share that is hidden": (
        "[python_stdlib]",
        "[python_stdlib]  mask_token = 3",
        "`masked = 15%`",
    ),
    "a parameter": ("init ~", "init w_outt ~ zeros  init ~", "did you mean `w_out`?"),
    "all parts of a parameter": (
        "  repeat layers {",
        "  init gainn ~ ones\n  repeat layers as i { if i < 1 { x = x * gain[hidden] } else {"
        " x = x / gain[hidden] }",
        "did you mean `gain`?",
    ),
    "an index": (
        "  repeat layers {",
        "  repeat layers as i { if layer < 1 { x = tanh(x) }",
        "the index here is `i`",
    ),
}


@pytest.mark.parametrize("what", HELPS)
def test_help(what: str) -> None:
    before, after, said = HELPS[what]
    assert before in PLAN
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("plan.scale", PLAN.replace(before, after, 1)))
    assert said in caught.value.diagnostics[0].help
