"""Passes as texts: each file of `texts/` has a plan, and lines of the IR before and after a pass.

A case begins with comments that say what it shows, and a plan.  `# before: PASS` and
`# after: PASS` each head lines of the IR at that place, in their order; `…` stands for any lines
between.  The plan's line, which ends each line of the IR, is left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from scalec.compiler.frontend import resolve
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, lower

TEXTS = Path(__file__).with_name("texts")
CASES = sorted(path.name for path in TEXTS.glob("*.ir"))
HEADING = re.compile(r"^# (before|after): (\w+)\n", re.MULTILINE)
PLAN_LINE = re.compile(r" +![\w./ -]+:\d+$")
ANY_LINES = "…"


@frozen
class Expected:
    """Lines that the IR has after a pass, in their order."""

    after: str
    lines: tuple[str, ...]


@frozen
class Case:
    """A file of `texts/`: its plan, and what it expects."""

    plan: str
    expected: tuple[Expected, ...]


def read_case(text: str) -> Case:
    """The case that a file's text is."""
    plan, *rest = HEADING.split(text)
    expected = tuple(
        Expected(_after(place, name), _lines(block))
        for place, name, block in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    )
    return Case(plan, expected)


def _after(place: str, name: str) -> str:
    """The pass after which to look: the named one, or the one before it."""
    assert name in PASS_NAMES, f"there is no pass {name}"
    return name if place == "after" else PASS_NAMES[PASS_NAMES.index(name) - 1]


def _lines(block: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in block.splitlines() if line.strip())


def ir_lines(case: Case, path: Path, after: str) -> list[str]:
    """The lines of the IR of a case's plan after a pass, without the plan's lines."""
    program = lower(resolve(Source(str(path), case.plan)), until=after)
    return [PLAN_LINE.sub("", line).strip() for line in print_ir(program).splitlines()]


def first_missing(expected: tuple[str, ...], lines: list[str]) -> str:
    """The first expected line that the IR does not have at its place, "" where it has all."""
    place, is_adjacent = 0, False
    for line in expected:
        if line == ANY_LINES:
            is_adjacent = False
            continue
        if is_adjacent:
            found = place if lines[place : place + 1] == [line] else None
        else:
            found = next(_places(line, lines, place), None)
        if found is None:
            return line
        place, is_adjacent = found + 1, True
    return ""


def _places(line: str, lines: list[str], begin: int) -> Iterator[int]:
    return (number for number in range(begin, len(lines)) if lines[number] == line)


@pytest.mark.parametrize("name", CASES)
def test_the_ir_has_the_lines_of_the_case(name: str) -> None:
    path = TEXTS / name
    case = read_case(path.read_text(encoding="utf-8"))
    assert case.expected, f"{name} expects nothing"
    for expected in case.expected:
        lines = ir_lines(case, path, expected.after)
        missing = first_missing(expected.lines, lines)
        assert not missing, f"after {expected.after}:\n" + "\n".join(lines) + f"\nlacks\n{missing}"


@pytest.mark.parametrize(
    ("expected", "missing"),
    [
        (("a", "b"), ""),
        (("a", "c"), "c"),
        (("a", ANY_LINES, "c"), ""),
        (("c", ANY_LINES, "a"), "a"),
        (("d",), "d"),
    ],
)
def test_lines_are_looked_for_in_their_order(expected: tuple[str, ...], missing: str) -> None:
    assert first_missing(expected, ["a", "b", "c"]) == missing
