"""Proofs and compiles kept from one command to the next: when one is read, when not, and what
is then said.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scalec.compiler import cli, proof
from scalec.compiler.cli import kept, kept_compiles, kept_proofs

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
def folder(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(working_folder / "cache"))
    monkeypatch.delenv(kept.NO_CACHE)
    return working_folder


@pytest.fixture
def compile_(folder: Path, capsys: pytest.CaptureFixture[str]) -> Compile:
    """`compile_(text, *words)` compiles a plan, and returns what is printed."""

    def run(text: str = PLAN, *words: str) -> str:
        (folder / "p.scale").write_text(text)
        assert cli.main(["compile", "p.scale", *words]) == 0
        return capsys.readouterr().out

    return run


KINDS = ("proofs", "compiles")


def files(folder: Path, kind: str = "proofs") -> list[Path]:
    return list((folder / "cache/scalec" / kind).iterdir())


def keep_only(folder: Path, kind: str) -> None:
    """Leaves what is kept of one kind; "" is all."""
    for other in KINDS:
        if kind not in ("", other):
            shutil.rmtree(folder / "cache/scalec" / other)


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_a_plan_is_proved_once(
    compile_: Compile, folder: Path, evaluated: list[str], kind: str
) -> None:
    """The second compile says in its output and in the certificate that the proof is an earlier
    one.
    """
    first, account = compile_(), json.loads((folder / "out/p/plan.json").read_text())
    script = (folder / "out/p/train.py").read_text()
    keep_only(folder, kind)
    second, other = compile_(), json.loads((folder / "out/p/plan.json").read_text())
    assert len(evaluated) == 1
    assert SAID not in first
    assert second == first.replace("\nwrote", f" ({SAID})\nwrote")
    assert other["certificate"]["values"].pop("evaluated") == SAID
    assert other == account
    assert (folder / "out/p/train.py").read_text() == script


def test_a_kept_compile_writes_what_a_kept_proof_does(compile_: Compile, folder: Path) -> None:
    compile_()
    compile_()
    by_compile = (folder / "out/p/plan.json").read_bytes()
    keep_only(folder, "proofs")
    compile_()
    assert (folder / "out/p/plan.json").read_bytes() == by_compile


def test_a_kept_compile_lowers_nothing(compile_: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_()
    monkeypatch.setattr("scalec.compiler.cli.compile.make_plan", None)
    assert SAID in compile_()


def test_passes_are_printed_although_a_compile_is_kept(
    compile_: Compile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_()
    monkeypatch.setenv("SCALEC_DUMP", "differentiate")
    assert cli.main(["compile", "p.scale"]) == 0
    assert "# after differentiate" in capsys.readouterr().err


def test_a_kept_compile_warns_as_the_first(
    compile_: Compile, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each format of diagnostics."""
    unfit = PLAN.replace("mesh", "cluster { gpu = h100_sxm }\nmesh").replace(
        "vocab = 12", "vocab = 12_000_000_000"
    )
    said = list[tuple[str, str]]()
    for words in ([], [], ["--format", "json"], ["--format", "json", "--no-cache"]):
        (folder / "p.scale").write_text(unfit)
        assert cli.main(["compile", "p.scale", *words]) == 0
        captured = capsys.readouterr()
        said.append((captured.out.replace(f" ({SAID})", ""), captured.err))
    assert "W0901" in said[0][1]
    assert said[0] == said[1]
    assert said[2] == said[3]


def test_a_plan_with_a_function_of_its_own_is_compiled_anew(
    compile_: Compile, folder: Path
) -> None:
    """Its module may have changed."""
    (folder / "mine.py").write_text("def twice(x):\n    return x + x\n")
    own = (
        "op twice(x[batch, seq, hidden]) -> [batch, seq, hidden] over batch, seq, hidden from"
        ' "mine:twice"\n'
    )
    text = own + PLAN.replace(
        "embedding(tokens, wte[vocab, hidden])", "twice(embedding(tokens, wte[vocab, hidden]))"
    )
    compile_(text, "--no-try")
    assert not (folder / "cache/scalec/compiles").exists()
    assert SAID in compile_(text, "--no-try")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vocab = 12", "vocab = 16"),
        ("dp = 2", "dp = 4"),
        ("lr = 0.1", "lr = 0.2"),
        ("hidden = 8", "hidden = 4"),
    ],
)
def test_another_plan_is_evaluated(
    compile_: Compile, evaluated: list[str], old: str, new: str
) -> None:
    compile_()
    compile_(PLAN.replace(old, new))
    assert len(evaluated) == 2


def test_other_spaces_and_comments_are_the_same_ir(compile_: Compile, evaluated: list[str]) -> None:
    compile_()
    compile_(f"# as before\n{PLAN}")
    assert len(evaluated) == 1


def test_a_comment_is_no_other_proof_and_another_compile(compile_: Compile, folder: Path) -> None:
    """Diagnostics show the text."""
    compile_()
    compile_(f"# as before\n{PLAN}")
    assert [len(files(folder, kind)) for kind in KINDS] == [1, 2]


def test_other_code_evaluates_anew(
    compile_: Compile, folder: Path, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that was changed may be wrong where the one before it was right."""
    compile_()
    changed = folder / "changed.py"
    changed.write_text("")
    usual = list(kept._files())
    monkeypatch.setattr(kept, "_files", lambda: iter([*usual, changed]))
    kept._digest_of_files.cache_clear()
    compile_()
    kept._digest_of_files.cache_clear()
    assert len(evaluated) == 2


def test_the_code_is_all_of_the_compiler() -> None:
    names = {path.name for path in kept._files()}
    assert {
        "insert_collectives.py",
        "interpreter.py",
        "algebra.py",
        "kept_proofs.py",
        "printer.py",
    } <= names


@pytest.mark.parametrize("words", [["--no-cache"], ["--no-verify"]], ids=str)
def test_a_proof_is_not_read_unless_it_is_asked_for(
    compile_: Compile, evaluated: list[str], words: list[str]
) -> None:
    compile_()
    assert SAID not in compile_(PLAN, *words)
    assert len(evaluated) == (2 if words == ["--no-cache"] else 1)


def test_the_environment_turns_it_off(
    compile_: Compile, folder: Path, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kept.NO_CACHE, "1")
    compile_()
    compile_()
    assert len(evaluated) == 2
    assert not (folder / "cache/scalec/proofs").exists()


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"against": 1}'])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_result_is_computed_anew(
    compile_: Compile, folder: Path, evaluated: list[str], kind: str, damage: str
) -> None:
    compile_()
    keep_only(folder, kind)
    (path,) = files(folder, kind)
    path.write_text(damage)
    assert SAID not in compile_()
    assert len(evaluated) == 2
    assert SAID in compile_()


def test_a_compile_that_was_cut_short_is_done_anew(compile_: Compile, folder: Path) -> None:
    compile_()
    keep_only(folder, "compiles")
    (path,) = files(folder, "compiles")
    path.write_bytes(path.read_bytes()[:-7])
    assert SAID not in compile_()


def test_a_folder_that_others_can_write_to_is_not_read(
    compile_: Compile, folder: Path, evaluated: list[str]
) -> None:
    compile_()
    (folder / "cache/scalec").chmod(0o777)
    compile_()
    assert len(evaluated) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_results_that_others_can_write_to_is_not_read(
    compile_: Compile, folder: Path, evaluated: list[str], kind: str
) -> None:
    compile_()
    keep_only(folder, kind)
    (folder / "cache/scalec" / kind).chmod(0o777)
    compile_()
    assert len(evaluated) == 2


def test_a_proof_that_fails_is_not_kept(
    folder: Path,
    compile_: Compile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from scalec.compiler.syntax.diagnostics import wrong

    def fail(program: object, model: object) -> object:
        raise wrong("E0701", "not equal", model.region.span)  # type: ignore[attr-defined]

    with monkeypatch.context() as patch:
        patch.setattr(proof, "verify", fail)
        (folder / "p.scale").write_text(PLAN)
        assert cli.main(["compile", "p.scale"]) == 1
    capsys.readouterr()
    assert SAID not in compile_()


def test_verify_always_evaluates(
    compile_: Compile, evaluated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_report_reads_it_and_says_so(
    compile_: Compile, folder: Path, evaluated: list[str]
) -> None:
    compile_()
    assert cli.main(["report", "p.scale", "-o", "p.html"]) == 0
    assert len(evaluated) == 1
    assert f"Evaluated {SAID}." in (folder / "p.html").read_text()


def test_the_oldest_go_first(
    compile_: Compile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_proofs, "PROOFS", kept.Results("proofs", most=2))
    monkeypatch.setattr(kept_compiles, "COMPILES", kept.Results("compiles", most=2))
    for vocab in (4, 8, 12):
        compile_(PLAN.replace("vocab = 12", f"vocab = {vocab}"))
    assert [len(files(folder, kind)) for kind in KINDS] == [2, 2]
    assert SAID in compile_()
    assert SAID not in compile_(PLAN.replace("vocab = 12", "vocab = 4"))
