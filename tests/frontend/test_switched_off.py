"""Each rule of validation is seen: without its statement something else becomes of a plan that
it refuses.
"""

import pytest

from helpers.refused_plans import Rule, noted, outcome, refused, rules, switched_off
from scalec.compiler.syntax.source import Source

Refused = dict[Rule, list[tuple[Source, object]]]


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Refused:
    """For each rule the plans that it refuses, and what is said of them."""
    found: Refused = {rule: [] for rule in rules()}
    for source in refused(tmp_path_factory.mktemp("refused")):
        with noted() as places:
            said = outcome(source)
        for rule in found:
            if any(map(rule.is_at, places)):
                found[rule].append((source, said))
    return found


@pytest.mark.long
def test_each_rule_is_reached(reached: Refused) -> None:
    unseen = [str(rule) for rule, plans in reached.items() if not plans]
    assert not unseen, "\n".join(unseen)


@pytest.mark.long
def test_each_rule_that_is_switched_off_is_missed(reached: Refused) -> None:
    unmissed: list[str] = []
    for rule, plans in reached.items():
        with switched_off(rule):
            if plans and all(outcome(source) == said for source, said in plans):
                unmissed.append(str(rule))
    assert not unmissed, "\n".join(unmissed)
