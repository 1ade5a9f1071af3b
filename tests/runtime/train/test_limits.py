"""Time limits: what the options say, and what follows from the steps so far."""

import pytest

from scalec.runtime.train.watchdog.limits import LEAST, Kind, Pace


@pytest.mark.parametrize(
    ("kind", "is_first", "limit"),
    [
        ("start", True, (1800, "--first-step-limit 1800")),
        ("step", True, (1800, "--first-step-limit 1800")),
        ("step", False, (300, "--step-limit 300")),
        ("validation", True, (1800, "--first-step-limit 1800")),
        ("validation", False, (300, "--step-limit 300")),
        ("save", True, (611, "--save-limit 600")),
        ("end", True, (611, "--save-limit 600")),
    ],
)
def test_the_options(kind: Kind, is_first: bool, limit: tuple[float, str]) -> None:
    assert Pace(first=1800, step=300, save=600).limit(kind, is_first) == limit


def test_without_an_option_a_step_may_take_ten_times_the_longest() -> None:
    pace = Pace(first=1800, step=None, save=600)
    assert pace.limit("step", False)[0] == LEAST
    for seconds in (50.0, 20.0):
        pace.done("step", seconds, False)
    assert pace.limit("step", False)[0] == 500
    assert pace.limit("validation", False)[0] == LEAST


@pytest.mark.parametrize(("priced", "second"), [(None, 6000), (3.0, 300), (0.1, LEAST)])
def test_a_first_step_counts_until_another_is_measured(priced: float | None, second: float) -> None:
    """And not where the step has a price."""
    pace = Pace(first=1800, step=None, save=600, priced=priced)
    pace.done("step", 600.0, True)
    pace.done("validation", 500.0, True)
    assert pace.limit("step", False)[0] == second
    pace.done("step", 20.0, False)
    assert pace.limit("step", False)[0] == 200
    assert pace.limit("validation", False)[0] == 5000
