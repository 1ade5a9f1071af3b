"""Every row of the catalogue of silent failures has a test here that plants it, or waits for a
feature that no plan can ask for yet.

The catalogue: ways in which frameworks that many use trained on, and were wrong; `docs/proof.md`
has them as a table.
"""

import re
from pathlib import Path

import pytest

from helpers.edited_text import replace_once
from helpers.planted_defects import TEXTS, Defect, lowered
from helpers.programs import get_error_code
from scalec.compiler.emit.readback import check as read_back
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.syntax.source import Source

ROWS = range(1, 109)
WAITS = {
    46: "attention sinks",
    47: "padding within a sequence",
    48: "sends and receives of a ring: rotations are collectives",
}
"""Rows of which nothing can be expressed today.  Of others a part waits, as their tests say."""

PLAN = TEXTS["llama"]
LATER = {
    "attention sinks": (replace_once(PLAN, {"mask=causal": "mask=causal, sinks=4"}), "E0606"),
    "offload": (
        replace_once(PLAN, {"precision = fp64": "precision = fp64  offload = cpu"}),
        "E0401",
    ),
}
"""Features that rows wait for, a plan that asks for each, and what it is told.

One that compiles needs its rows.
"""


FOLDER = Path(__file__).parent
SOURCES = "\n".join(path.read_text() for path in sorted(FOLDER.glob("test_*.py")))
TESTS = re.findall(r"(?m)^def (test_row_(\d+)_\w+)", SOURCES)


def _table() -> dict[int, str]:
    """What the documentation says of each row."""
    text = (FOLDER.parents[1] / "docs" / "proof.md").read_text()
    section = text.partition("## What frameworks got wrong in silence")[2].partition("\n## ")[0]
    lines = re.findall(r"(?m)^\| ([\d, ]+) \|(.*)$", section)
    return {int(row): line for rows, line in lines for row in rows.split(",")}


def test_every_row_is_planted_or_waits() -> None:
    planted = {int(row) for _, row in TESTS}
    assert planted | {*WAITS} == {*ROWS}
    assert not planted & {*WAITS}


PLANTED = re.findall(r'Defect\(\s*"([^"]+)"', SOURCES)


@pytest.mark.sample(12)
@pytest.mark.parametrize("plan", dict.fromkeys(PLANTED))
def test_without_a_defect_types_fit_and_the_text_is_the_program(plan: str) -> None:
    """So that it is the defect that is refused; values without one are in each of the other
    files.
    """
    assert Defect(plan).types() == ""
    program = lowered(plan)
    read_back(train_py(program, Source("tiny.scale", TEXTS[plan])), program)


def test_the_documentation_has_every_row_and_its_tests() -> None:
    table, names = _table(), {name for name, _ in TESTS}
    assert [*table] == [*ROWS]
    unnamed = [
        name
        for name, row in TESTS
        if not {f"`{name}`", f"`test_row_{row}_…`"} & {*_quoted(table[int(row)])}
    ]
    assert unnamed == []
    assert [name for line in table.values() for name in _named(line) if name not in names] == []


def _quoted(line: str) -> list[str]:
    return re.findall(r"`[^`]+`", line)


def _named(line: str) -> list[str]:
    return re.findall(r"`(test_row_\w+)`", line)


@pytest.mark.parametrize("feature", LATER)
def test_what_waits_cannot_be_written(feature: str) -> None:
    plan, code = LATER[feature]
    assert get_error_code(plan) == code
