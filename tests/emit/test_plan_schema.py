"""The schema of plan.json: it names each field, says what it is, and refuses others."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from helpers.plan_schema import mistakes
from scalec.compiler.cli import main
from scalec.compiler.emit.plan_json import SCHEMA
from scalec.compiler.emit.plan_schema import plan_schema

ROOT = Path(__file__).parents[2]
GOLDEN = (ROOT / "tests" / "golden" / "tiny_llama" / "plan.json").read_text(encoding="utf-8")


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The parts of a schema that name properties."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for part in schema.values():
            yield from objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part)


def test_no_object_has_fields_that_it_does_not_name() -> None:
    assert not [
        each for each in objects(plan_schema()) if each.get("additionalProperties") is not False
    ]


def test_the_version_is_that_of_the_file() -> None:
    assert plan_schema()["properties"]["schema"] == {"const": SCHEMA} | {
        "description": plan_schema()["properties"]["schema"]["description"]
    }
    assert json.loads(GOLDEN)["schema"] == SCHEMA


def test_a_plan_json_is_as_its_schema_says() -> None:
    assert not mistakes(GOLDEN)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 0),
        (("more",), 1),
        (("memory", "more"), 1),
        (("memory", "state"), "many"),
        (("settings", "train", "sed"), 1),
        (("settings", "train", "seq"), 0),
        (("collectives", 0, "op"), "broadcast"),
        (("collectives", 0, "color"), ""),
        (("certificate", "values", "trials"), None),
    ],
    ids=lambda it: ".".join(map(str, it)) if isinstance(it, tuple) else "",
)
def test_it_refuses_others(path: tuple[str | int, ...], value: object) -> None:
    said = json.loads(GOLDEN)
    at = said
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    assert mistakes(json.dumps(said))


def test_what_user_ops_add(tmp_path: Path) -> None:
    assert main(["compile", str(ROOT / "examples" / "05_user_op.scale"), "-o", str(tmp_path)]) == 0
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert "modules" in json.loads(text)
    assert not mistakes(text)


def test_what_programs_of_torch_alone_add(tmp_path: Path) -> None:
    plan = str(ROOT / "plans" / "tiny_llama.scale")
    assert main(["compile", plan, "--no-verify", "--target", "dtensor", "-o", str(tmp_path)]) == 0
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    hashes: dict[str, str] = {}
    for name in ("train.py", "torch_ops.py"):
        hashes[name] = sha256((tmp_path / name).read_bytes()).hexdigest()
    said = json.loads(text)
    assert said["target"] == "dtensor"
    assert said["files"] == hashes
    assert not mistakes(text)


@pytest.mark.parametrize("of", ["settings", "plan"])
def test_the_command_prints_it(of: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", of]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"].endswith("2020-12/schema")
