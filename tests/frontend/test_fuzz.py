"""Plans with words left out, doubled, exchanged or replaced: each compiles, or is refused by
diagnostics; nothing else.

Valid plans are drawn by `scalec.testing.random_plans`, so that the passes are reached; mutants of
plans by hand here.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.mistakes import PLAN
from scalec.compiler.syntax.codes import get_codes
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.testing.random_plans import drafts

ROOT = Path(__file__).parents[2]
EXAMPLES = (path.read_text("utf-8") for path in sorted(ROOT.glob("examples/*.scale")))
PLANS = [PLAN, *(text for text in EXAMPLES if "\nuse " not in text and 'from "' not in text)]
WORD = re.compile(r"\s+|#[^\n]*|\"[^\"\n]*\"|[A-Za-z_]\w*|[0-9][0-9_.e%A-Za-z-]*|->|\.\.|.")
MORE = [
    "0",
    "-1",
    "2",
    "1e9",
    "3..4",
    "over",
    "as",
    "via",
    "pad",
    "every",
    "zero 3 over dp",
    "}",
    "{",
    "(",
    "]",
    '"x"',
]
BATCHES, LONG, SHORT = 20, 5_000, 10
"""Mutants of a batch, at length and at every run: 100,000 and 200."""


def mutants(random: Random, count: int) -> Iterator[str]:
    """Texts of plans with one to three edits of words."""
    everywhere = [word for plan in PLANS for word in WORD.findall(plan) if word.strip()]
    for _ in range(count):
        words = WORD.findall(random.choice(PLANS))
        for _ in range(random.randint(1, 3)):
            at = random.choice([i for i, word in enumerate(words) if word.strip()] or [0])
            other = random.randrange(len(words))
            match random.randrange(6):
                case 0:
                    words[at] = ""
                case 1:
                    words.insert(at, words[at] + " ")
                case 2:
                    words[at], words[other] = words[other], words[at]
                case 3:
                    words[at] = random.choice(everywhere)
                case 4:
                    words.insert(at, f" {random.choice(MORE)} ")
                case _:
                    words[at] = random.choice(MORE)
        yield "".join(words)


def refused(text: str, folder: Path) -> PlanError | None:
    """Why a plan is refused, if it is; whatever else is raised is an error of the compiler."""
    try:
        compile_plan(Source(str(folder / "plan.scale"), text), "insert_collectives")
    except PlanError as error:
        told = error
    else:
        return None
    assert {each.code for each in told.diagnostics} <= get_codes().keys()
    assert str(told)
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module of the plan's own op."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "own.py").write_text("def gate(x, y, by):\n    return x * y * by\n")
    return folder


def attempt(random: Random, count: int, folder: Path) -> None:
    for text in mutants(random, count):
        try:
            refused(text, folder)
        except Exception as error:
            raise AssertionError(text) from error


@pytest.mark.sample(7)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutants_of_plans(batch: int, folder: Path) -> None:
    attempt(Random(batch), SHORT, folder)


@pytest.mark.long
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_hundred_thousand_mutants(batch: int, folder: Path) -> None:
    attempt(Random(1_000 + batch), LONG, folder)


@pytest.mark.long
@settings(max_examples=2_000)
@given(drafts(), st.randoms(use_true_random=False))
def test_mutants_of_random_plans(plan: str, random: Random) -> None:
    words = WORD.findall(plan)
    at = random.choice([i for i, word in enumerate(words) if word.strip()])
    words[at] = random.choice(["", words[at] * 2, *MORE])
    refused("".join(words), ROOT)
