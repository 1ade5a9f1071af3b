"""The table of docs/features.md is what the compiler does: each two features are proved
together, or refused.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from helpers.features import FEATURES, PROVED, Feature, document, outcome, pairs, written

PAGE = Path(__file__).parents[1] / "docs" / "features.md"
SLICE = 10
"""Pairs at every run, besides two that are refused."""


def names(pair: tuple[Feature, Feature]) -> tuple[str, str]:
    return pair[0].name, pair[1].name


def test_the_page_has_all_pairs_and_is_as_it_is_written() -> None:
    text = PAGE.read_text("utf-8")
    assert written(text).keys() == {names(pair) for pair in pairs()}
    assert document(written(text)) == text


def test_some_pairs_are_as_the_page_has_them() -> None:
    outcomes = written(PAGE.read_text("utf-8"))
    refused = [pair for pair in pairs() if outcomes[names(pair)] != PROVED]
    some = Random(0).sample(pairs(), SLICE) + Random(0).sample(refused, 2)
    assert {names(pair): outcome(pair) for pair in some} == {
        names(pair): outcomes[names(pair)] for pair in some
    }


@pytest.mark.long
def test_every_feature_is_proved_by_itself() -> None:
    assert {feature.name: outcome([feature]) for feature in FEATURES} == dict.fromkeys(
        (feature.name for feature in FEATURES), PROVED
    )


@pytest.mark.long
def test_the_page(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/features.md", document({names(pair): outcome(pair) for pair in pairs()}))
