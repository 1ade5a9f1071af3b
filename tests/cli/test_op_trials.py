"""Commands that try functions: errors at the plan's line, and what is said of functions that were
not tried.

Non-goals: the checks (`tests/testing/test_op_trial.py`).
"""

import json
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from scalec.compiler.cli import main, op_trials, run
from scalec.compiler.cli.compile import compile_source
from scalec.compiler.cli.op_trials import Trials, TriedFunctions
from scalec.compiler.syntax.limits import load

MODULE = """
def slopes(q, count):
    import torch
    head = torch.arange(q.shape[-2], device=q.device, dtype=q.dtype)
    return q * torch.exp2(-8 / count * (head + 1))[:, None]


def tripled(x):
    return 3 * x
"""

PLAN = """
op slopes(linear q[.., n, d], count) -> [.., n, d] over .., n from "own:slopes"
op tripled(linear x[.., f]) -> [.., f] over .., f from "own:tripled" deterministic

model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  heads = 4  head_dim = 4 }
  init ~ normal(0.5)
  x = tripled(embedding(tokens, wte[vocab, hidden]))
  q = x @ wq[hidden -> heads, head_dim]
  x = x + attention(q, q, q, mask=causal) @ wo[heads, head_dim -> hidden]
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { tp = 2 }
shard { vocab, heads over tp }
train {
  seq = 8  global_batch = 8  microbatch = 2  steps = 2
  optimizer sgd { lr = 0.1 }
  data text { files = [python_stdlib] }
}
"""

CALLS_SLOPES = PLAN.replace("attention(q, q, q", "attention(slopes(q, heads), q, q")
WITHOUT_SLOPES = PLAN.replace(PLAN[: PLAN.index("op tripled")], "\n")


def write_plan(folder: Path, plan: str, module: str = MODULE) -> Path:
    """A plan in a folder, its module beside it."""
    (folder / "own.py").write_text(module)
    path = folder / "own.scale"
    path.write_text(plan)
    return path


def try_functions(trials: Trials, path: Path) -> TriedFunctions:
    """The trials of a plan's functions."""
    plan = compile_source(load(path))
    return trials.try_functions(plan.model, plan.source)


def certificate(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())["certificate"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["check", "compile", "run"])
def test_a_function_that_counts_a_ranks_heads_is_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With it two meshes train differently: each rank's heads would have the slopes of the
    first.
    """
    monkeypatch.setattr(run, "torchrun", lambda *words: pytest.fail("the plan was started"))
    plan, out = write_plan(tmp_path, CALLS_SLOPES), tmp_path / "out"
    options = [] if command == "check" else ["-o", str(out)]
    assert main([command, str(plan), *options]) == 1
    said = capsys.readouterr().err
    assert "error[E0222]: `slopes` of `own.py` is not slice by slice along `heads`: " in said
    assert "results differ when the function gets half of `heads`" in said
    assert "2 | op slopes(linear q[.., n, d], count) -> [.., n, d] over .., n from" in said
    assert not out.exists()


def test_the_certificate_says_what_was_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = write_plan(tmp_path, WITHOUT_SLOPES), tmp_path / "out"
    assert main(["compile", str(plan), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "\nverified: the step is " in said
    assert "\ntried: own:tripled, on random numbers\n" in said
    account = json.loads((out / "plan.json").read_text())
    (tried,) = account["certificate"]["tried"]
    assert tried["function"] == "own:tripled"
    assert tried["module"] == account["modules"]["own.py"]
    assert tried["tried"][:2] == ["slice by slice along batch, seq, hidden", "linear in operand 1"]
    assert "taken_at_their_word" not in account["certificate"]
    text = (out / "train.py").read_text()
    assert "Tried on random numbers: own:tripled." in text
    assert "erified, but for" not in text
    assert main(["verify", "--recheck", str(out)]) == 0


def test_a_module_that_was_changed_is_not_run_by_a_recheck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = write_plan(tmp_path, WITHOUT_SLOPES), tmp_path / "out"
    assert main(["compile", str(plan), "-o", str(out)]) == 0
    mark = tmp_path / "was_run"
    module = out / "own.py"
    module.write_text(f"open({str(mark)!r}, 'w').close()\n{module.read_text()}")
    assert main(["verify", "--recheck", str(out)]) == 1
    assert "own.py is not the plan's" in capsys.readouterr().err
    assert not mark.exists()


NOT_TRIED = [  # options, what replaces the module, and the reason
    (["--no-try"], MODULE, "--no-try was given"),
    ([], f"import no_such_package\n{MODULE}", "there is no module `no_such_package` here"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "module", "reason"), NOT_TRIED, ids=["--no-try", "no such package"]
)
def test_what_was_not_tried_is_named(
    options: list[str], module: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = write_plan(tmp_path, WITHOUT_SLOPES, module), tmp_path / "out"
    assert main(["check", str(plan), *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok, but for own:tripled  tiny: ")
    assert f"not tried: own:tripled, since {reason}" in said
    assert main(["compile", str(plan), "-o", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert "\nverified, but for own:tripled: the step is " in said
    assert f"not tried: own:tripled, since {reason}" in said
    assert certificate(out)["taken_at_their_word"] == ["own:tripled"]
    assert certificate(out)["verified"] == "verified, but for own:tripled"
    assert "tried" not in certificate(out)
    assert "\nVerified, but for own:tripled." in (out / "train.py").read_text()
    assert main(["verify", "--recheck", str(out)]) == 0


def test_without_torch_functions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(op_trials, "find_spec", lambda name: None)
    assert main(["check", str(write_plan(tmp_path, WITHOUT_SLOPES))]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok, but for own:tripled  tiny: ")
    assert "not tried: own:tripled, since torch is not installed" in said


def test_where_torch_does_not_work_functions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(op_trials, "PROGRAM", "no_such_module")
    assert main(["check", str(write_plan(tmp_path, WITHOUT_SLOPES))]) == 0
    assert "not tried: own:tripled, since torch cannot be imported" in capsys.readouterr().out


def test_a_function_with_several_mistakes_is_told_once_at_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ops have the function, and the one with `n` in `over` is called with other dims too."""
    first, _, rest = CALLS_SLOPES.lstrip().partition("\n")
    whole = first.replace("op slopes", "op whole").replace("over .., n", "over ..")
    calls = rest.replace("slopes(q, heads)", "whole(slopes(q, heads), heads)")
    other_dims = (
        "x = x + slopes(x @ wz[hidden -> groups, head_dim], 4) @ wy[groups, head_dim ->"
        " hidden]\n  loss"
    )
    calls = calls.replace("heads = 4", "heads = 4  groups = 4").replace("loss", other_dims, 1)
    ops = f"{whole} deterministic\n{first} deterministic\n"
    plan = write_plan(tmp_path, f"{ops}{calls}".replace("shard { vocab, heads", "shard { vocab"))
    assert main(["check", str(plan)]) == 1
    said = capsys.readouterr().err
    assert said.count("error[") == 1
    assert "own.scale:2:" in said


@pytest.mark.long
def test_programs_of_torch_alone_are_tried_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = write_plan(tmp_path, WITHOUT_SLOPES), tmp_path / "out"
    words = ["compile", str(plan), "-o", str(out), "--target", "dtensor"]
    assert main(words) == 0
    assert "\ntried: own:tripled, on random numbers\n" in capsys.readouterr().out
    assert "Tried on random numbers: own:tripled." in (out / "train.py").read_text()
    assert main(["verify", "--recheck", str(out)]) == 0
    assert main([*words, "--no-try"]) == 0
    assert "\nVerified, but for own:tripled." in (out / "train.py").read_text()
    refused = write_plan(tmp_path, CALLS_SLOPES)
    assert main(["compile", str(refused), "-o", str(out), "--target", "dtensor"]) == 1


def test_ir_text_is_tried_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, ir = write_plan(tmp_path, CALLS_SLOPES), tmp_path / "own.ir"
    assert main(["ir", str(plan), "--after", "resolve"]) == 0
    ir.write_text(capsys.readouterr().out)
    assert main(["check", str(ir)]) == 1
    assert "is not slice by slice along `heads`" in capsys.readouterr().err


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a function starts ends with its trial, and no compiled module lies beside
    the plan.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    mark = tmp_path / "later"
    command = f"sleep 3; touch {mark}"
    module = f"import subprocess\nsubprocess.Popen(['sh', '-c', {command!r}])\n{MODULE}"
    plan = write_plan(tmp_path, WITHOUT_SLOPES, module)
    trials = Trials("", None)
    assert try_functions(trials, plan).untried == {}
    trials.end()
    sleep(3.5)
    assert not mark.exists()
    assert not (tmp_path / "__pycache__").exists()


def test_a_plan_without_ops_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_trials, "TrialProcess", lambda: pytest.fail("a process was started"))
    without_ops = WITHOUT_SLOPES[WITHOUT_SLOPES.index("model") :]
    plan = write_plan(tmp_path, without_ops.replace("tripled(", "2 * ("))
    assert main(["check", str(plan)]) == 0
