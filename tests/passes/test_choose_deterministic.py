"""Copies that a kernel would let drift apart: attention gets a deterministic kernel, other ops
are an error.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from scalec.compiler.analysis.memory import account
from scalec.compiler.emit import emit
from scalec.compiler.ir import Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

MODEL = """
model m(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32  heads = 4  head_dim = 8  ffn = 48  layers = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    a = rmsnorm(x, norm[hidden], 1e-5)
    q = a @ wq[hidden -> heads, head_dim]
    k = a @ wk[hidden -> heads, head_dim]
    x = x + attention(q, k, a @ wv[hidden -> heads, head_dim], mask=causal) @ wo[heads, head_dim -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
"""
TRAIN = (
    "\ntrain { seq = 16  global_batch = 8  microbatch = 2  steps = 30  optimizer sgd { lr = 1e-3 }"
)
TRAIN += "  data text { files = [python_stdlib] } }\n"
OWN = """
op mine(x[.., f]) -> [.., f] over .. from "ops:mine"
model m(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 32 }
  init ~ normal(0.02)
  x = mine(embedding(tokens, wte[vocab, hidden]))
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
"""
ALIKE, APART = (
    "shard { batch over dp  vocab over tp }",
    "shard { batch over dp  vocab over tp  seq over tp }",
)
MESH = "mesh { dp = 2  tp = 2 }\n"


def _compiled(*parts: str, until: str = "schedule_pipeline") -> tuple[Program, Source]:
    source = Source("m.scale", "".join(parts))
    return compile_plan(source, until), source


@pytest.mark.parametrize(
    ("mesh", "marked"),
    [
        (MESH + ALIKE, True),
        (MESH + "shard { batch over dp  vocab, heads over tp }", False),
        (MESH + APART, False),
        ("mesh { dp = 2 }  shard { vocab over dp }", True),
        ("mesh { dp = 2 }  shard { batch over dp }", False),
        ("mesh { dp = 2  tp = 1 }  shard { batch over dp  vocab over tp }", False),
        ("mesh { pp = 2  dp = 2 }  shard { layers over pp  batch over dp }", False),
        (
            "mesh { cp = 2  tp = 2  dp = 2 }  shard { batch over dp  seq over cp via ring "
            " vocab over tp }",
            True,
        ),
        ("", False),
    ],
)
def test_attention_that_ranks_compute_alike_is_deterministic(mesh: str, marked: bool) -> None:
    program, source = _compiled(MODEL, mesh, TRAIN)
    found = [
        dict(op.attrs).get("deterministic") == "on"
        for op in program.ops
        if op.kind.endswith("attention")
    ]
    assert {*found} == {marked}
    assert ("deterministic=True" in emit(program, source)["train.py"]) == marked


def test_the_step_with_a_deterministic_kernel_is_proved_and_reads_back() -> None:
    program, _ = _compiled(MODEL, MESH, ALIKE, TRAIN)
    model, _ = _compiled(MODEL, MESH, ALIKE, TRAIN, until="resolve")
    verify(program, model)
    assert read_ir(Source("m.ir", print_ir(program))) == program


def test_a_program_whose_copies_would_drift_is_not_legal() -> None:
    text = print_ir(_compiled(MODEL, MESH, ALIKE, TRAIN, until="insert_collectives")[0])
    assert ', deterministic="on"' in text
    with pytest.raises(AssertionError, match=r"^insert_collectives: _o: its copies would drift$"):
        lower(read_ir(Source("m.ir", text.replace(', deterministic="on"', ""))))


def test_a_deterministic_backward_has_sums_for_more_processors() -> None:
    """On GPUs, of few samples and heads; in half the bits that sums have."""
    of = {
        shard: account(
            _compiled(MODEL, MESH, f"shard {{ batch over dp  {shard} over tp }}", BF16)[0]
        ).total
        for shard in ("vocab", "vocab, heads")
    }
    assert of["vocab"] - of["vocab, heads"] > 16 * 32 * 4 * 20


BF16 = (
    f"cluster {{ gpu = h100_sxm"
    f" }}{TRAIN.replace('seq = 16', 'seq = 64  precision = bf16  kernels = torch')}"
)


def test_what_has_no_deterministic_kernel_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ops.py").write_text("def mine(x):\n    return x * 2\n")
    told: list[str] = []
    for plan in (
        OWN + MESH + ALIKE + TRAIN,
        MODEL + MESH + ALIKE + TRAIN.replace("steps", "compile = on  steps"),
    ):
        with pytest.raises(PlanError) as caught:
            _compiled(plan)
        told += [str(each) for each in caught.value.diagnostics]
    golden("mistakes_of_copies.txt", "\n\n".join(told) + "\n")
    _compiled(OWN, MESH, APART, TRAIN)
    _compiled(OWN.replace('"ops:mine"', '"ops:mine" deterministic'), MESH, ALIKE, TRAIN)
