"""Warnings of what compiles and is hardly meant: `check` shows them, and its status is 0."""

from pathlib import Path

import pytest

from scalec.compiler.cli import main

PLAN = """
model m(tokens[batch, seq], labels[batch, seq]) bidirectional {
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
    text = (
        PLAN.replace("bidirectional", "")
        .replace("mask=full", "mask=causal")
        .replace("steps = 1", f"steps = 1  recompute = {recompute}")
    )
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
        ("[python_stdlib]", "[python_stdlib]  masked = 15%  mask_token = 0", False),
    ],
)
def test_answers_in_sight(
    before: str, after: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.scale").write_text(PLAN.replace(before, after, 1) if before else PLAN)
    assert main(["check", str(tmp_path / "m.scale")]) == 0
    said = capsys.readouterr().err
    assert (
        said.startswith(
            "warning[W0902]: a bidirectional model can see the tokens that it must predict"
        )
        == warned
    )
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
    assert (
        "warning[W0906]: pipeline stages keep unsharded gradients and reduce them once per step"
        in said
    ) == bool(kinds)
    assert (f"help: write `{kinds} over dp`, which is what the program does" in said) == bool(kinds)
    assert ("and resharded after a stage" in said) == freed


ROUTED = """
model m(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 8  hidden = 16  experts = 8  expert_ffn = 16 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  y = x
  route y to experts by top(y @ router[hidden -> experts], 2) {
    y = silu(y @ up[hidden -> expert_ffn]) @ down[expert_ffn -> hidden]
  }
  loss = cross_entropy((x + y) @ head[hidden -> vocab], labels)
}
cluster { CLUSTER }
mesh { dp = 2 }
shard { RULES  batch over dp }
train {
  seq = SEQ  global_batch = 4  microbatch = 1  steps = 1  room = 1.5
  optimizer sgd { lr = 0.5 }
  data text { files = [python_stdlib] }
}
"""


@pytest.mark.parametrize(
    ("seq", "cluster", "said"),
    [
        (24, "", "12 rows"),
        (31, "", "15 rows"),
        (32, "", ""),
        (2, "", "1 row"),
        (1, "", "less than 1 row"),
        (32, "gpu = a100_80gb", ""),
        (32, "gpu = h100_sxm", "16 rows"),
        (128, "gpu = h100_sxm", ""),
        (32, "gpu = rtx_5090", ""),
    ],
)
def test_few_rows(
    seq: int, cluster: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choices of both ranks' tokens, two of each, are those of 8 experts."""
    text = (
        ROUTED.replace("SEQ", str(seq))
        .replace("CLUSTER", cluster)
        .replace("RULES", "experts over dp")
    )
    (tmp_path / "m.scale").write_text(text)
    assert main(["check", str(tmp_path / "m.scale")]) == 0
    err = capsys.readouterr().err.split("\n")[0]
    assert err == (
        f"warning[W0905]: each expert gets {said} of a microbatch on average" if said else ""
    )


@pytest.mark.parametrize(("rules", "said"), [("experts over dp", ""), ("", "`room` has no effect")])
def test_room_of_nothing(
    rules: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.scale").write_text(
        ROUTED.replace("SEQ", "128").replace("CLUSTER", "").replace("RULES", rules)
    )
    assert main(["check", str(tmp_path / "m.scale")]) == 0
    assert said in capsys.readouterr().err
    assert main(["check", str(tmp_path / "m.scale"), "--must-fit"]) == 1  # no GPU is named
    (tmp_path / "m.scale").write_text(
        PLAN.replace("steps = 1", "steps = 1  room = 2").replace("full", "causal")
    )
    assert main(["check", str(tmp_path / "m.scale")]) == 0
    assert "warning[W0912]: `room` has no effect" in capsys.readouterr().err
    (tmp_path / "m.scale").write_text(PLAN.replace("steps = 1", "steps = 1  room = 0.9"))
    assert main(["check", str(tmp_path / "m.scale")]) == 1
    assert "error[E0405]: `room` must be at least 1" in capsys.readouterr().err
