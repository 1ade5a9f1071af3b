"""Emitted programs of random plans on gloo ranks against plain torch in one process, in float64.

The plans are those of many in which most of the language stands, and whose numbers stay small.
Non-goals: smallest counterexamples; a plan that fails is printed as it was drawn.
"""

import pytest

from helpers.oracle.compare import assert_same
from helpers.random_models.draws import DRAWS, covering, get_drafts, table, words
from helpers.random_models.trials import Trial
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

pytestmark = pytest.mark.xdist_group("random numbers")  # one process draws the sample

PLANS, MORE = 12, 30
"""So many, and so many more where long tests are asked for."""
LIMIT = 1e3
"""Of numbers and of slopes: a rounding error of 2^-53 in such a number has become 1e-10 behind
such a slope.
"""


@pytest.fixture(scope="module")
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
    """Of plans that do without powers, sums of sums, and norms of nothing but rounding."""

    def tried(plan: str) -> Trial | None:
        try:
            trial = Trial.of(plan, tmp_path_factory.mktemp("plan"))
        except PlanError:
            return None
        return trial if trial.largest() <= LIMIT else None

    return covering(
        PLANS + (MORE if request.config.getoption("--long") else 0), get_drafts(DRAWS), tried
    )


@pytest.mark.long
def test_all_of_the_language_is_executed(sample: list[Trial]) -> None:
    executed = set[str]()
    for trial in sample:
        executed |= words(trial.plan, compile_plan(Source("plan.scale", trial.plan), "resolve"))
    assert executed >= table(), table() - executed


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "number",
    [*range(PLANS), *(pytest.param(PLANS + each, marks=pytest.mark.long) for each in range(MORE))],
)
def test_steps_equal_plain_torch(sample: list[Trial], number: int) -> None:
    """Loss, every gradient, their norm and the parameters after each step."""
    trial = sample[number]
    print(trial.plan)
    for got, want in zip(trial.emitted(), trial.expected(), strict=True):
        assert_same(got, want, "")
