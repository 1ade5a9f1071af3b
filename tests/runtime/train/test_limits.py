"""Time limits: what the options say, and what follows from the steps so far.

A store that does not answer is told, once its time has passed; one that has answered is not.
"""

import threading

import pytest

from scalec.runtime.train.watchdog import limits
from scalec.runtime.train.watchdog.limits import LEAST, Kind, Pace, Patience


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


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(limits, "DEAF", 0.05)
    return []


def _made(told: list[str]) -> tuple[Patience, threading.Event]:
    ending = threading.Event()

    def leave(reason: str) -> None:
        told.append(reason)
        ending.set()

    made = Patience(leave, ending, 0.01)
    made.start()
    return made, ending


def test_a_request_without_an_answer_is_told(told: list[str]) -> None:
    made, ending = _made(told)
    with made.request():
        assert ending.wait(60)
    assert "the job's store has not answered for 0 s: rank 0 or the launcher" in told[0]


def test_an_answered_request_says_nothing(told: list[str]) -> None:
    made, ending = _made(told)
    with made.request():
        pass
    assert not ending.wait(0.3)
    ending.set()
    assert told == []
