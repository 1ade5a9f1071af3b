"""Warnings of what compiles and is hardly meant: `check` shows them, and its status is 0."""

from pathlib import Path

import pytest

from scalec.compiler.cli import main

PLAN = """
model m(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 16  heads = 2  head_dim = 8 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  q = x @ wq[hidden -> heads, head_dim]
  x = x + attention(q, q, q, mask=full) @ wo[heads, head_dim -> hidden]
  loss = cross_entropy(x @ wte, labels)
}
train {
  seq = 8  global_batch = 4  microbatch = 4  steps = 1
  optimizer sgd { lr = 0.5 }
  data text { files = [python_stdlib] }
}
"""


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ("every(5, layers)", "warning[W0903]: `every(5, layers)`: `layers` has only 2 iterations"),
        ("every(2, layers)", ""),
        ("full", ""),
    ],
)
def test_fewer_turns_than_one_is_done_again_of(
    recompute: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAN.replace("mask=full", "mask=causal").replace("steps = 1", f"steps = 1  recompute = {recompute}")
    text = text.replace("head_dim = 8", "head_dim = 8  layers = 2").replace(
        "  q =", "  repeat layers { x = silu(x) }\n  q ="
    )
    (tmp_path / "m.scale").write_text(text)
    assert main(["check", str(tmp_path / "m.scale")]) == 0
    assert capsys.readouterr().err.split("\n")[0] == said


@pytest.mark.parametrize(
    ("before", "after", "warned"),
    [
        ("", "", True),
        ("mask=full", "mask=causal", False),
        ("[python_stdlib]", "[python_stdlib]  masked = 15%  mask_token = 0", False),
    ],
)
def test_answers_in_sight(
    before: str, after: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.scale").write_text(PLAN.replace(before, after, 1) if before else PLAN)
    assert main(["check", str(tmp_path / "m.scale")]) == 0
    said = capsys.readouterr().err
    assert said.startswith("warning[W0902]: attention can see the tokens it must predict") == warned
    assert bool(said) == warned


STAGED = """
model m(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 16  ffn = 24  layers = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers { x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden] }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { pp = 2  dp = 2 }
shard { batch over dp  layers over pp }
state { STATE }
pipeline { schedule = 1f1b }
train {
  seq = 8  global_batch = 16  microbatch = 4  steps = 1
  optimizer sgd { lr = 0.5 }
  data text { files = [python_stdlib] }
}
"""


@pytest.mark.parametrize(
    ("state", "kinds", "freed"),
    [
        ("zero 2 over dp", "optimizer", False),
        ("zero 3 over dp", "parameters, optimizer", True),
        ("parameters, optimizer over dp", "", False),
        ("zero 1 over dp", "", False),
    ],
)
def test_what_stages_do_once_a_step(
    state: str, kinds: str, freed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.scale").write_text(STAGED.replace("STATE", state))
    assert main(["check", str(tmp_path / "m.scale")]) == 0
    said = capsys.readouterr().err
    assert ("warning[W0906]: pipeline stages keep unsharded gradients and reduce them once per step" in said) == bool(
        kinds
    )
    assert (f"help: write `{kinds} over dp`, which is what the program does" in said) == bool(kinds)
    assert ("and resharded after a stage" in said) == freed
