"""Proofs kept from one command to the next: when one is read, when it is not, and what is then said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scalec.compiler import cli, proof
from scalec.compiler.cli import kept_proofs

PLAN = """model bigram(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 12  hidden = 8 }
  init ~ normal(0.1)
  loss = cross_entropy(embedding(tokens, wte[vocab, hidden]) @ head[hidden -> vocab], labels)
}
mesh { dp = 2 }
shard { batch over dp }
train {
  seq = 4  global_batch = 8  microbatch = 2  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = ["a"] }
}
"""
SAID = "by an earlier command, from the same IR; --no-cache evaluates it anew"

Compile = Callable[..., str]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models whose proofs were evaluated, in their order."""
    names = list[str]()
    usual = proof.verify

    def verify(program: object, model: object) -> object:
        names.append(getattr(model, "name", ""))
        return usual(program, model)  # type: ignore[arg-type]

    monkeypatch.setattr(proof, "verify", verify)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(kept_proofs.NO_CACHE)
    return tmp_path


@pytest.fixture
def compile_(folder: Path, capsys: pytest.CaptureFixture[str]) -> Compile:
    """`compile_(text, *words)` compiles a plan, and returns what is printed."""

    def run(text: str = PLAN, *words: str) -> str:
        (folder / "p.scale").write_text(text)
        assert cli.main(["compile", "p.scale", *words]) == 0
        return capsys.readouterr().out

    return run


def kept(folder: Path) -> list[Path]:
    return list((folder / "cache/scalec/proofs").iterdir())


def test_a_plan_is_proved_once(compile_: Compile, folder: Path, evaluated: list[str]) -> None:
    """The second compile says in its output and in the certificate that the proof is an earlier one."""
    first, account = compile_(), json.loads((folder / "out/p/plan.json").read_text())
    second, other = compile_(), json.loads((folder / "out/p/plan.json").read_text())
    assert len(evaluated) == 1
    assert SAID not in first
    assert second == first.replace("\nwrote", f" ({SAID})\nwrote")
    assert other["certificate"]["values"].pop("evaluated") == SAID
    assert other == account


def test_the_program_is_the_same(compile_: Compile, folder: Path) -> None:
    compile_()
    script = (folder / "out/p/train.py").read_text()
    compile_()
    assert (folder / "out/p/train.py").read_text() == script


@pytest.mark.parametrize(
    ("old", "new"),
    [("vocab = 12", "vocab = 16"), ("dp = 2", "dp = 4"), ("lr = 0.1", "lr = 0.2"), ("hidden = 8", "hidden = 4")],
)
def test_another_plan_is_evaluated(compile_: Compile, evaluated: list[str], old: str, new: str) -> None:
    compile_()
    compile_(PLAN.replace(old, new))
    assert len(evaluated) == 2


def test_other_spaces_and_comments_are_the_same_ir(compile_: Compile, evaluated: list[str]) -> None:
    compile_()
    compile_(f"# as before\n{PLAN}")
    assert len(evaluated) == 1


def test_other_code_evaluates_anew(
    compile_: Compile, folder: Path, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that was changed may be wrong where the one before it was right."""
    compile_()
    changed = folder / "changed.py"
    changed.write_text("")
    usual = list(kept_proofs._code())
    monkeypatch.setattr(kept_proofs, "_code", lambda: iter([*usual, changed]))
    compile_()
    assert len(evaluated) == 2


def test_the_code_is_all_of_the_compiler() -> None:
    names = {path.name for path in kept_proofs._code()}
    assert {"insert_collectives.py", "interpreter.py", "algebra.py", "kept_proofs.py", "printer.py"} <= names


@pytest.mark.parametrize("words", [["--no-cache"], ["--no-verify"]], ids=str)
def test_a_proof_is_not_read_unless_it_is_asked_for(compile_: Compile, evaluated: list[str], words: list[str]) -> None:
    compile_()
    assert SAID not in compile_(PLAN, *words)
    assert len(evaluated) == (2 if words == ["--no-cache"] else 1)


def test_the_environment_turns_it_off(
    compile_: Compile, folder: Path, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kept_proofs.NO_CACHE, "1")
    compile_()
    compile_()
    assert len(evaluated) == 2
    assert not (folder / "cache/scalec/proofs").exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"against": 1}'])
def test_a_damaged_proof_is_evaluated_anew(compile_: Compile, folder: Path, evaluated: list[str], damage: str) -> None:
    compile_()
    (path,) = kept(folder)
    path.write_text(damage)
    assert SAID not in compile_()
    assert len(evaluated) == 2
    assert SAID in compile_()


def test_a_folder_that_others_can_write_to_is_not_read(compile_: Compile, folder: Path, evaluated: list[str]) -> None:
    compile_()
    (folder / "cache/scalec").chmod(0o777)
    compile_()
    assert len(evaluated) == 2


def test_a_folder_of_proofs_that_others_can_write_to_is_not_read(
    compile_: Compile, folder: Path, evaluated: list[str]
) -> None:
    compile_()
    (folder / "cache/scalec/proofs").chmod(0o777)
    compile_()
    assert len(evaluated) == 2


def test_a_proof_that_fails_is_not_kept(
    folder: Path, compile_: Compile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scalec.compiler.syntax.diagnostics import wrong

    def fail(program: object, model: object) -> object:
        raise wrong("E0701", "not equal", model.region.span)  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        patch.setattr(proof, "verify", fail)
        (folder / "p.scale").write_text(PLAN)
        assert cli.main(["compile", "p.scale"]) == 1
    capsys.readouterr()
    assert not kept(folder)
    assert SAID not in compile_()


def test_verify_always_evaluates(compile_: Compile, evaluated: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    compile_()
    assert cli.main(["verify", "p.scale"]) == 0
    assert len(evaluated) == 2
    assert SAID not in capsys.readouterr().out


def test_recheck_takes_a_folder_whose_proof_was_kept(
    compile_: Compile, folder: Path, evaluated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It evaluates the step itself, and still finds words that scalec did not write."""
    compile_()
    compile_()
    assert cli.main(["verify", "--recheck", "out/p"]) == 0
    assert len(evaluated) == 2
    account = folder / "out/p/plan.json"
    account.write_text(account.read_text().replace(SAID, "by nobody"))
    assert cli.main(["verify", "--recheck", "out/p"]) == 1
    assert "it differs under certificate" in capsys.readouterr().err


def test_a_report_reads_it_and_says_so(compile_: Compile, folder: Path, evaluated: list[str]) -> None:
    compile_()
    assert cli.main(["report", "p.scale", "-o", "p.html"]) == 0
    assert len(evaluated) == 1
    assert f"Evaluated {SAID}." in (folder / "p.html").read_text()


def test_the_oldest_go_first(compile_: Compile, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_proofs, "MOST", 2)
    for vocab in (4, 8, 12):
        compile_(PLAN.replace("vocab = 12", f"vocab = {vocab}"))
    assert len(kept(folder)) == 2
    assert SAID in compile_()
    assert SAID not in compile_(PLAN.replace("vocab = 12", "vocab = 4"))
