"""Files of data that are there when a plan is compiled, and are of another format, are mistakes
at their names.
"""

from pathlib import Path

import numpy as np
import pytest

from scalec.compiler.cli import main
from scalec.compiler.frontend import data_files, resolve
from scalec.compiler.syntax.codes import get_example_plan
from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.syntax.source import Source
from scalec.formats.token_folder import Recipe, TokenFolder

PLAN: str = get_example_plan()
DATA = "data text { files = [python_stdlib] }"


def _mistakes(data: str) -> tuple[Diagnostic, ...]:
    assert DATA in PLAN
    try:
        resolve(Source("plan.scale", PLAN.replace(DATA, data)))
    except PlanError as error:
        return error.diagnostics
    return ()


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> Path:
    """The working directory, with a text, raw ids and files that are neither."""
    (working_folder / "one.txt").write_text("some text " * 100)
    (working_folder / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    np.save(working_folder / "ids.npy", np.arange(1000))
    np.arange(1000, dtype=np.uint16).tofile(working_folder / "ids.bin")
    return working_folder


def test_folders_that_are_no_samples_are_mistakes_at_their_names(folder: Path) -> None:
    recipe = Recipe("", "", "--pair a b", 64, None, None, masked=True, pair=True, skip_bad=False)
    index = TokenFolder(recipe, (), (), {})
    (folder / "pairs").mkdir()
    (folder / "pairs" / "index.json").write_text(index.to_json())
    (folder / "empty").mkdir()
    for name, what in (("pairs", "has pairs of chosen"), ("empty", "has no index.json")):
        mistake, *_ = _mistakes(f'data folder {{ files = ["{name}"] }}')
        assert mistake.code == "E0420"
        assert f"{name} {what}" in mistake.message


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (
            'data text { files = ["one.txt", "train.jsonl"] }',
            "train.jsonl is JSON lines, not plain text",
        ),
        (
            'data tokens { files = ["ids.npy"] }',
            "ids.npy is a NumPy array (.npy), not raw token ids of uint16",
        ),
        ('data tokens { files = ["one.txt"] }', "one.txt is text, not raw token ids of uint16"),
        (
            'data text { files = [python_stdlib, "ids.*"] }',
            "ids.npy is a NumPy array (.npy), not plain text",
        ),
        (
            'data text { set a { files = ["one.txt"] }  set b { files = ["train.jsonl"] } }',
            "train.jsonl is JSON lines, not plain text",
        ),
        (
            'data tokens { files = ["hf://a/b"] }',
            "`hf://a/b` is an address (hf), not a path: download its files, and name their paths",
        ),
    ],
)
def test_such_a_file_is_a_mistake_at_its_name(data: str, what: str) -> None:
    (mistake,) = _mistakes(data)
    assert (mistake.code, mistake.message) == ("E0420", what)
    name = what.partition(" is ")[0].strip("`")
    shown = mistake.span.text.splitlines()[mistake.span.line - 1][mistake.span.column - 1 :]
    assert shown.startswith(f'"{name if name in data else "ids.*"}"')


def test_each_pattern_has_a_mistake_of_its_own() -> None:
    assert (
        len(_mistakes('data text { files = ["train.jsonl", "ids.npy", "one.txt", "s3://a/b"] }'))
        == 3
    )


@pytest.mark.parametrize(
    "data",
    [
        'data text { files = ["one.txt"] }',
        'data tokens { files = ["ids.bin"] }',
        'data text { files = ["elsewhere/*.jsonl"] }',
        'data text { files = ["train.jsonl"]  as_is = on }',
        'data tokens { files = ["ids.npy"]  as_is = on }',
    ],
)
def test_files_that_are_right_or_meant_or_elsewhere_are_none(data: str) -> None:
    assert not _mistakes(data)


def test_some_of_many_files_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last among them."""
    for number in range(100):
        (folder / f"part-{number:03}.txt").write_text("text")
    (folder / "part-099.txt").write_text('{"text": "a"}\n{"text": "b"}\n')
    reads, foreign = list[str](), data_files.foreign
    monkeypatch.setattr(
        data_files, "foreign", lambda path, dtype: reads.append(path) or foreign(path, dtype)
    )
    assert len(_mistakes('data text { files = ["part-*.txt"] }')) == 1
    assert (len(reads), reads[0], reads[-1]) == (data_files.READ, "part-000.txt", "part-099.txt")


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_a_program_is_told_that_a_file_is_meant(kind: str, folder: Path) -> None:
    """And read back, so that a program without the word is not the plan's."""
    files = {"text": "train.jsonl", "tokens": "ids.npy"}[kind]
    plan = PLAN.replace(DATA, f'data {kind} {{ files = ["{files}"]  as_is = on }}')
    (folder / "plan.scale").write_text(plan)
    assert main(["compile", "plan.scale", "-o", "out"]) == 0
    program = folder / "out" / "train.py"
    assert "as_is=True" in program.read_text()
    program.write_text(program.read_text().replace(", as_is=True", ""))
    assert main(["verify", "--recheck", "out"]) == 1
