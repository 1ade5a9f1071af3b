"""All mistakes of a plan are told in one go, whatever their kinds: each once, and nothing that follows from another."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from helpers.mistakes import MISTAKES, PLAN, Mistake, edited
from scalec.compiler.passes import compile_plan
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source

PAIRS, TRIPLES = 120, 60
"""How many of each are tried at every run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module of the plan's own op."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "own.py").write_text("def gate(x, y, by):\n    return x * y * by\n")
    return folder


def told(folder: Path, text: str) -> list[tuple[str, int]]:
    with pytest.raises(PlanError) as caught:
        compile_plan(Source(str(folder / "plan.scale"), text))
    return sorted((each.code, each.span.line) for each in caught.value.diagnostics)


def differs(folder: Path, several: Sequence[Mistake]) -> bool:
    """Whether any is told twice, or anything else is, or one is not that can be known beside the others."""
    text, expected, sure = edited(several)
    found = told(folder, text)
    return len(found) != len({*found}) or not sure <= {*found} <= expected


def apart(several: Sequence[Mistake]) -> bool:
    """Whether they touch different lines."""
    return all(first.lines.isdisjoint(second.lines) for first, second in combinations(several, 2))


def drawn(random: Random, count: int, size: int) -> Iterator[tuple[Mistake, ...]]:
    """Several mistakes each time, which touch different lines."""
    while count:
        several = tuple(random.sample(MISTAKES, size))
        if apart(several):
            count -= 1
            yield several


def test_the_plan_itself_compiles(folder: Path) -> None:
    compile_plan(Source(str(folder / "plan.scale"), PLAN))


def test_there_are_mistakes_of_each_kind() -> None:
    kinds = Counter(mistake.kind for mistake in MISTAKES)
    assert min(kinds.values()) >= 12, kinds
    assert len(MISTAKES) >= 90, kinds


@pytest.mark.parametrize("mistake", MISTAKES, ids=[f"{mistake.kind}: {mistake.name}" for mistake in MISTAKES])
def test_one_mistake_is_one_message(mistake: Mistake, folder: Path) -> None:
    text, expected, _ = edited([mistake])
    assert told(folder, text) == sorted(expected)


@pytest.mark.parametrize(("size", "count"), [(2, PAIRS), (3, TRIPLES)])
def test_several_mistakes_are_all_told_and_nothing_else(size: int, count: int, folder: Path) -> None:
    wrong = [[each.name for each in several] for several in drawn(Random(0), count, size) if differs(folder, several)]
    assert not wrong


@pytest.mark.long
def test_all_pairs(folder: Path) -> None:
    pairs = [pair for pair in combinations(MISTAKES, 2) if apart(pair)]
    wrong = [[each.name for each in pair] for pair in pairs if differs(folder, pair)]
    assert not wrong, f"{len(wrong)} of {len(pairs)}: {wrong[:10]}"
