"""The tables of `explain memory` add up, in small plans, random ones and shipped ones."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings

from helpers.memory_plans import texts
from scalec.compiler.analysis.memory import account
from scalec.compiler.analysis.memory.account import over_microbatch
from scalec.compiler.ir import Program
from scalec.compiler.reports.explain import memory
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.testing.random_plans import drafts

ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*(ROOT / "plans").glob("*.scale"), *(ROOT / "examples").glob("*.scale")])

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = re.compile(r"(-?)([\d,.]+) (B|KiB|MiB|GiB|TiB)$")

Rows = list[tuple[str, float, float]]


def size_of(row: str) -> tuple[float, float]:
    """The bytes that a row shows, and by how many they may be rounded."""
    found = SIZE.search(row)
    assert found, row
    sign, number, unit = found.groups()
    size = float(number.replace(",", "")) * UNITS[unit]
    rounding = 0.0 if unit == "B" else 0.06 * UNITS[unit]
    return (-size if sign else size), rounding


def tables_of(text: str) -> dict[str, Rows]:
    """The tables of a report by the first words of their heads, whose last column is in bytes."""
    found = dict[str, Rows]()
    for block in text.split("\n\n"):
        head, *rows = block.split("\n")
        if head.endswith("bytes"):
            name = re.split(r"  +", head)[0]
            found[name] = [(re.split(r"  +", row)[0], *size_of(row)) for row in rows]
    return found


def check_adds_up(rows: Rows, total: str) -> tuple[float, float]:
    """Rows up to a total sum to it; returned is what it shows, with its rounding."""
    names = [name for name, _, _ in rows]
    at = names.index(total)
    parts = [row for row in rows[:at] if row[0] != "total"]
    shown, rounding = rows[at][1:]
    rounding += sum(each for _, _, each in parts)
    assert abs(sum(size for _, size, _ in parts) - shown) <= rounding, (total, rows)
    return rows[at][1:]


def check_report(program: Program) -> None:
    """Both tables add up, and the second ends in the first one's line about it."""
    found = tables_of(memory(program))
    check_adds_up(found["per rank"], "total")
    saved = next(rows for name, rows in found.items() if name.startswith("saved activations"))
    check_adds_up(saved, "total")
    last = saved[-1][0]
    ends_at, rounding = check_adds_up(saved, last)
    line = [row[1:] for row in found["per rank"] if row[0] == "saved activations"]
    size, of_line = line[0] if line else (0.0, 0.0)
    assert abs(size - ends_at) <= rounding + of_line, (size, ends_at, saved)


def check_walk(program: Program) -> None:
    """When backward begins, memory has what the table lists: the walk over ops agrees with the
    list of tensors.
    """
    if not program.pipeline:
        most = max(moment.kept for moment in over_microbatch(program))
        assert most == account(program).activations


@pytest.mark.sample(18)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_tables_of_shipped_plans_add_up(path: Path) -> None:
    program = compile_plan(load(path))
    check_report(program)
    check_walk(program)


SMALL = dict(texts())


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", SMALL)
def test_tables_of_small_plans_add_up(name: str) -> None:
    program = compile_plan(Source(str(ROOT / "plans" / "small.scale"), SMALL[name]))
    check_report(program)
    check_walk(program)


@settings(max_examples=25)
@given(drafts())
def test_tables_of_random_plans_add_up(plan: str) -> None:
    """The few drafts that are no plans have no report."""
    try:
        program = compile_plan(Source("random.scale", plan))
    except PlanError:
        return
    check_report(program)
    check_walk(program)
