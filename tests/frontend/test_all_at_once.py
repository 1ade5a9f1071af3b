"""All mistakes of a plan are told in one go, whatever their kinds: each once, and nothing that
follows from another.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from frontend.test_mistakes import PLAN as SMALL
from helpers.edited_text import replace_once
from helpers.mistakes import MISTAKES, PLAN, Mistake, edited
from helpers.pipeline_plan import PLAN as PIPELINE
from helpers.refused_plans import RULES_TP
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PAIRS, TRIPLES = 120, 60
"""How many of each are tried at every run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module of the plan's own op."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "own.py").write_text("def gate(x, y, by):\n    return x * y * by\n")
    return folder


def get_codes_and_lines(folder: Path, text: str) -> list[tuple[str, int]]:
    with pytest.raises(PlanError) as caught:
        compile_plan(Source(str(folder / "plan.scale"), text))
    return sorted((each.code, each.span.line) for each in caught.value.diagnostics)


def differs(folder: Path, several: Sequence[Mistake]) -> bool:
    """Whether any is told twice, or anything else is, or one is not that can be known beside
    the others.
    """
    text, expected, sure = edited(several)
    found = get_codes_and_lines(folder, text)
    return len(found) != len({*found}) or not sure <= {*found} <= expected


def apart(several: Sequence[Mistake]) -> bool:
    """Whether they touch different lines."""
    return all(first.lines.isdisjoint(second.lines) for first, second in combinations(several, 2))


def random_mistakes(random: Random, count: int, size: int) -> Iterator[tuple[Mistake, ...]]:
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


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[f"{mistake.kind}: {mistake.name}" for mistake in MISTAKES]
)
def test_one_mistake_is_one_message(mistake: Mistake, folder: Path) -> None:
    text, expected, _ = edited([mistake])
    assert get_codes_and_lines(folder, text) == sorted(expected)


@pytest.mark.parametrize(("size", "count"), [(2, PAIRS), (3, TRIPLES)])
def test_several_mistakes_are_all_told_and_nothing_else(
    size: int, count: int, folder: Path
) -> None:
    wrong = [
        [each.name for each in several]
        for several in random_mistakes(Random(0), count, size)
        if differs(folder, several)
    ]
    assert not wrong


# needs ffn whole
SOFTMAX = {"silu(x @ w_in[hidden -> ffn])": "softmax(x @ w_in[hidden -> ffn], over=ffn)"}
# tp is not innermost
SWAPPED = {"dp = 2  tp": "tp = 2  cp", "batch over dp": "", "seq over tp": "seq over tp, cp"}
RING = {"tp = 2": "cp = 2", RULES_TP: "seq over cp via ring"}
FFN = {**SOFTMAX, "batch over": "ffn over"}
# what is written instead of what in a plan; what is told, of which the last could wait for a pass
LATE = [
    (PIPELINE, {"layers = 6": "layers = 1", "lr = 1e-3": "lr = -1"}, "E0405 E0517"),
    (PIPELINE, {**FFN, "pipeline {": "pipeline { stages = [1, 2, 2, 2]"}, "E0517 E0601"),
    (PIPELINE, {**FFN, "steps = 3": "steps = none"}, "E0404 E0601"),
    (PIPELINE, {**FFN, "= 1f1b": "= 2f2b"}, "E0104 E0601"),
    (PIPELINE, {**FFN, "1f1b": "dualpipev", "pp = 4": "pp = 2", "= 24": "= 6"}, "E0517 E0601"),
    (PIPELINE, {**FFN, "1f1b": "zb_h1", "steps = 3": "steps = 3  compile = on"}, "E0412 E0601"),
    (
        PIPELINE,
        {**FFN, "1f1b": "auto(memory=1, chunks=2)", "layers = 6": "layers = 8"},
        "E0517 E0601",
    ),
    (PIPELINE, {**FFN, "1f1b": "auto", "= 24": "= 240000"}, "E0517 E0601"),
    (
        SMALL,
        {"theta = 10000": "theta = -1", "kv_heads, ffn": "ffn", **SOFTMAX},
        "E0313 E0601 E0609",
    ),
    (SMALL, {"steps = 3": "steps = 3  recompute = selective(atention)", **SOFTMAX}, "E0410 E0601"),
    (SMALL, {**SWAPPED, "1e-3": "-1"}, "E0405 E0506"),
    (SMALL, {**SWAPPED, "nodes = 1": "nodes = 2"}, "E0506 E0512"),
    (SMALL, {"ffn = 48": "ffn = 0", **RING, "steps = 3": "steps = 3  compile = on"}, "E0304 E0412"),
    (SMALL, {**SOFTMAX, "steps = 3": "steps = 3  recompute = auto"}, "E0419 E0601"),
]


@pytest.mark.parametrize(("plan", "edits", "codes"), LATE, ids=map(str, range(len(LATE))))
def test_what_passes_find_is_told_beside_the_rest(
    plan: str, edits: dict[str, str], codes: str, folder: Path
) -> None:
    assert (
        " ".join(code for code, _ in get_codes_and_lines(folder, replace_once(plan, edits)))
        == codes
    )


def test_a_module_that_cannot_be_copied_is_told_beside_the_rest(
    folder: Path, tmp_path: Path
) -> None:
    """Once, whatever number of ops is of it."""
    (tmp_path / "own.py").write_text(f"from . import near\n{(folder / 'own.py').read_text()}")
    second = 'op other(x[.., f], y[.., f], by) -> [.., f] over .., f from "own:gate"\n'
    text = second + PLAN.replace("lr = 1e-3", "lr = -1")
    assert [code for code, _ in get_codes_and_lines(tmp_path, text)] == ["E0221", "E0405"]


@pytest.mark.long
def test_all_pairs(folder: Path) -> None:
    pairs = [pair for pair in combinations(MISTAKES, 2) if apart(pair)]
    wrong = [[each.name for each in pair] for pair in pairs if differs(folder, pair)]
    assert not wrong, f"{len(wrong)} of {len(pairs)}: {wrong[:10]}"
