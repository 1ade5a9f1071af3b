"""Diagnostics for machines: the forms, their escapes, and SARIF's rules for what they have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft4Validator, Draft202012Validator

from helpers.node import modules
from scalec.compiler.cli import main
from scalec.compiler.reports.diagnostic_formats import FORMATS
from scalec.compiler.syntax.codes import get_code
from scalec.compiler.syntax.diagnostics import Diagnostic, Note
from scalec.compiler.syntax.source import Source

MODEL = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 32 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
"""
WRONG = """use "tiny model.scale"
mesh { dp = 2  tp = 3 }
shard { batch over dp  vocab over tp }
train {
  seq = 128  global_batch = 32  microbatch = 8  steps = 240
  optimizer adamw { lr = 0.003  schedule = cosine(wamup=20) }
  data text { files = [python_stdlib] }
}
"""
RIGHT = (
    WRONG.replace("tp = 3", "tp = 2").replace("wamup", "warmup") + "cluster { reserve = 1GiB }\n"
)

TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1}},
    "required": ["text"],
}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
FROM_1 = {"type": "integer", "minimum": 1}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


FILE = _closed(["uri"], uri={"type": "string", "pattern": r"^[!-~]+$"})
REGION = _closed(
    ["startLine"], startLine=FROM_1, startColumn=FROM_1, endLine=FROM_1, endColumn=FROM_1
)
PLACE = _closed(
    [],
    physicalLocation=_closed(["artifactLocation"], artifactLocation=FILE, region=REGION),
    message=TEXT,
)
REPLACEMENT = _closed(["deletedRegion"], deletedRegion=REGION, insertedContent=TEXT)
CHANGES = {
    "type": "array",
    "minItems": 1,
    "items": _closed(
        ["artifactLocation", "replacements"],
        artifactLocation=FILE,
        replacements={"type": "array", "minItems": 1, "items": REPLACEMENT},
    ),
}
SARIF = _closed(
    ["version", "runs"],
    **{
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": _closed(
                ["tool"],
                tool=_closed(
                    ["driver"],
                    driver=_closed(
                        ["name"],
                        name={"type": "string"},
                        version={"type": "string"},
                        rules={
                            "type": "array",
                            "uniqueItems": True,
                            "items": _closed(
                                ["id"],
                                id={"type": "string"},
                                shortDescription=TEXT,
                                fullDescription=TEXT,
                                help=TEXT,
                                defaultConfiguration=_closed([], level=LEVEL),
                            ),
                        },
                    ),
                ),
                columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                results={
                    "type": "array",
                    "items": _closed(
                        ["message"],
                        ruleId={"type": "string"},
                        ruleIndex={"type": "integer", "minimum": 0},
                        level=LEVEL,
                        message=TEXT,
                        locations={"type": "array", "items": PLACE},
                        relatedLocations={"type": "array", "items": PLACE, "uniqueItems": True},
                        fixes={
                            "type": "array",
                            "items": _closed(["artifactChanges"], artifactChanges=CHANGES),
                        },
                    ),
                },
            ),
        },
    },
)
"""The part of the schema of SARIF 2.1.0 (OASIS 2020, section 3) that such logs use."""


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> Path:
    for name, text in (("tiny model.scale", MODEL), ("wrong.scale", WRONG), ("right.scale", RIGHT)):
        Path(name).write_text(text)
    return working_folder


def run_check(
    form: str, name: str, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """The status, and all of standard output, of `scalec check`; nothing is on standard error."""
    status = main([*(words or ("check",)), name, "--format", form])
    out, err = capsys.readouterr()
    assert not err
    return status, out


@pytest.mark.parametrize("form", FORMATS)
def test_errors(
    form: str, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    status, out = run_check(form, "wrong.scale", capsys)
    assert status == 1
    golden(f"diagnostics/errors.{form}", out)


@pytest.mark.parametrize("form", FORMATS)
def test_warnings(
    form: str, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    status, out = run_check(form, "right.scale", capsys)
    assert status == 0
    golden(f"diagnostics/warnings.{form}", out)


def test_none(capsys: pytest.CaptureFixture[str]) -> None:
    Path("right.scale").write_text(RIGHT.replace("cluster { reserve = 1GiB }", ""))
    assert json.loads(run_check("json", "right.scale", capsys)[1]) == {
        "version": 1,
        "diagnostics": [],
    }
    assert json.loads(run_check("sarif", "right.scale", capsys)[1])["runs"][0]["results"] == []
    assert run_check("github", "right.scale", capsys) == (0, "")


def test_positions_are_those_of_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run_check("json", "wrong.scale", capsys)[1])["diagnostics"]
    words = {}
    for each in found:
        start, end = each["range"]["start"], each["range"]["end"]
        assert start["line"] == end["line"]
        words[each["code"]] = WRONG.splitlines()[start["line"] - 1][
            start["column"] - 1 : end["column"] - 1
        ]
    assert words == {"E0510": "vocab", "E0401": "wamup"}


@pytest.mark.parametrize("name", ["wrong.scale", "right.scale", "none.scale"])
def test_sarif_is_as_its_schema_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = json.loads(run_check("sarif", name, capsys)[1])
    assert not [error.message for error in Draft202012Validator(SARIF).iter_errors(log)]
    (run,) = log["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        for place in (*result["locations"], *result.get("relatedLocations", ())):
            uri = place["physicalLocation"]["artifactLocation"]["uri"]
            assert name == "none.scale" or Path(unquote(uri)).is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", ["wrong.scale", "right.scale", "none.scale"])
def test_sarif_is_as_the_schema_of_oasis_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole schema, which a package of npm has; the part of it above is the same for all
    that it names.
    """
    schema = json.loads(
        (
            modules() / "@microsoft" / "jest-sarif" / "lib" / "schemas" / "sarif-2.1.0-rtm.5.json"
        ).read_text()
    )
    Draft4Validator.check_schema(schema)
    log = json.loads(run_check("sarif", name, capsys)[1])
    validator = Draft4Validator(schema, format_checker=Draft4Validator.FORMAT_CHECKER)
    assert not [f"{error.json_path}: {error.message}" for error in validator.iter_errors(log)]
    assert [*validator.iter_errors(log | {"runs": [{"tool": {}}]})]


def test_a_file_as_a_whole_has_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(run_check("json", "none.scale", capsys)[1])["diagnostics"]
    assert (found["code"], found["file"], "range" in found) == ("E0101", "none.scale", False)
    assert run_check("github", "none.scale", capsys)[1].startswith(
        "::error file=none.scale,title=E0101%3A "
    )


def test_compile_writes_and_tells_no_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run_check("json", "right.scale", capsys, "compile")
    assert (status, [each["code"] for each in json.loads(out)["diagnostics"]]) == (0, ["W0916"])
    assert (folder / "out" / "right" / "train.py").is_file()
    assert run_check("json", "wrong.scale", capsys, "compile")[0] == 1


def test_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run_check("json", "right.scale", capsys, "check", "--must-fit")
    assert (status, [each["code"] for each in json.loads(out)["diagnostics"]]) == (
        1,
        ["W0916", "W0915"],
    )


WORDS = st.text(st.sampled_from("%%:,\r\n=;25aA0D\u2028é😀"))


@given(WORDS, WORDS, WORDS)
def test_a_workflow_command_is_one_line_that_reads_back(path: str, message: str, help: str) -> None:
    """As the runner of GitHub Actions reads it: `actions/runner`, ActionCommand.cs, TryParseV2."""
    span = Source(path, "x" * 9).span(2, 5)
    found = Diagnostic("E0104", message, span, notes=(Note(None, "seen"),), help=help)
    line = FORMATS["github"]([found])
    assert line.endswith("\n")
    assert not {"\n", "\r"} & {*line[:-1]}
    assert line.startswith("::")
    info, _, data = line[2:-1].partition("::")
    command, _, rest = info.partition(" ")
    assert command == "error"
    properties = {
        key: unescaped(value, COLON, COMMA)
        for key, value in (each.split("=", 1) for each in rest.split(","))
    }
    place = {"line": "1", "endLine": "1", "col": "3", "endColumn": "6"}
    assert properties == {"file": path, **place, "title": f"E0104: {get_code('E0104').title}"}
    assert unescaped(data) == "\n".join(
        (message, "note: seen", *([f"help: {help}"] if help else []))
    )


COLON, COMMA = ("%3A", ":"), ("%2C", ",")


def unescaped(text: str, *more: tuple[str, str]) -> str:
    for written, sign in (("%0D", "\r"), ("%0A", "\n"), *more, ("%25", "%")):
        text = text.replace(written, sign)
    return text


@given(st.text(), st.text(st.characters(exclude_characters="\0"), min_size=1), st.text())
def test_any_diagnostic_has_a_form(message: str, path: str, note: str) -> None:
    """A path may have bytes that are no text."""
    span = Source(f"{path}\udcff", "ab\ncd").span(1, 4)
    found = Diagnostic(
        "W0916", f"m{message}", span, notes=(Note(span, f"n{note}"), Note(None, note))
    )
    assert json.loads(FORMATS["json"]([found]))["diagnostics"][0]["range"]["end"] == {
        "line": 2,
        "column": 2,
    }
    assert Draft202012Validator(SARIF).is_valid(json.loads(FORMATS["sarif"]([found])))
