"""Terminals that lack signs, and pipes that nobody reads to the end."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCALEC = Path(sys.executable).with_name("scalec")
PLANS = Path(__file__).parents[2] / "plans"
LLAMA, PIPELINE = PLANS / "tiny_llama.scale", PLANS / "tiny_pipeline.scale"
ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1:strict"},
    {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
]


def run(
    *words: str | Path, env: dict[str, str] | None = None, **more: object
) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, which has streams of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "check": False} | more
    return subprocess.run([SCALEC, *words], env=os.environ | (env or {}), **pipes)  # type: ignore[call-overload]


@pytest.mark.sample(3)
@pytest.mark.parametrize("env", ASCII, ids=["ascii", "latin-1", "C"])
@pytest.mark.parametrize(
    "words",
    [
        ("explain", "collectives", LLAMA),
        ("explain", "memory", PIPELINE),
        ("schedule", PIPELINE),
        ("verify", LLAMA),
        ("compile", LLAMA, "-o", "out"),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words[1], str) else words[0],
)
def test_a_terminal_that_lacks_signs(
    words: tuple[str | Path, ...], env: dict[str, str], tmp_path: Path
) -> None:
    found = run(*words, env=env, cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, b"")
    assert found.stdout.isascii() or env["PYTHONIOENCODING"].startswith("latin")


def test_our_own_signs_have_others_in_ascii(tmp_path: Path) -> None:
    (tmp_path / "größe.scale").write_text("model é {}\n", encoding="utf-8")
    found = run("check", "größe.scale", env=ASCII[0], cwd=tmp_path)
    assert found.returncode == 1
    assert b"gr\\xf6\\xdfe.scale:1:1" in found.stderr
    shown = run("explain", "collectives", LLAMA, env=ASCII[0], cwd=tmp_path).stdout
    assert b"Psi: a row's parameters" in shown
    assert b"\\u" not in shown


@pytest.mark.sample(1)
@pytest.mark.parametrize("env", ASCII, ids=["ascii", "latin-1", "C"])
def test_files_are_utf_8(env: dict[str, str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.scale"
    plan.write_text(
        LLAMA.read_text()
        .replace("python_stdlib", '"größe → ×"')
        .replace('"models/', '"scalec:models/')
    )
    run("compile", plan, "-o", "one", env=env, cwd=tmp_path)
    run("compile", plan, "-o", "other", cwd=tmp_path)
    for name in ("train.py", "plan.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    text = run("ir", plan, env=env, cwd=tmp_path).stdout
    assert text == run("ir", plan, cwd=tmp_path).stdout
    assert "größe → ×".encode() in text
    laid_out = run("fmt", "-", env=env, cwd=tmp_path, input=plan.read_bytes()).stdout
    assert "größe → ×".encode() in laid_out


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    plan = tmp_path / os.fsdecode(b"\xff.scale")
    plan.write_text(LLAMA.read_text().replace('"models/', '"scalec:'))
    assert b"error[E0205]" in run("check", plan).stderr
    plan.write_text(LLAMA.read_text().replace('"models/', '"scalec:models/'))
    for words in (("compile", "-o", tmp_path / "out"), ("ir",)):
        assert (run(*words, plan).returncode, run(*words, plan).stderr) == (0, b"")
    assert run("verify", "--recheck", tmp_path / "out").returncode == 0


@pytest.mark.parametrize(
    "words", [("check", LLAMA), ("--help",), ("ir", LLAMA), ("check", "nothing.scale")]
)
def test_a_closed_pipe_is_quiet(words: tuple[str | Path, ...], tmp_path: Path) -> None:
    read, written = os.pipe()
    os.close(read)
    closed: Any = {"stderr" if words[-1] == "nothing.scale" else "stdout": written}
    found = run(*words, cwd=tmp_path, **closed)
    os.close(written)
    assert found.returncode == (0 if words[0] == "--help" else 141)  # argparse takes it for its own
    assert (found.stdout or b"", found.stderr or b"") == (b"", b"")


def test_closed_streams(tmp_path: Path) -> None:
    found = subprocess.run(
        ["sh", "-c", f"{SCALEC} check {LLAMA} >&- 2>&-"], check=False, cwd=tmp_path
    )
    assert found.returncode == 0
