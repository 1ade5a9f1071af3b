"""Time limits: what the options say, and what follows from the steps so far.

A store that does not answer is told, once its time has passed; one that has answered is not.
"""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from scalec.runtime import Mesh
from scalec.runtime.train.watchdog import limits, watcher
from scalec.runtime.train.watchdog.limits import EARLY, LEAST, Kind, Pace, Patience
from scalec.runtime.train.watchdog.watcher import _ANSWER, Watchdog


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
    for is_early in (True, False):
        assert Pace(first=1800, step=300, save=600).limit(kind, is_first, is_early) == limit


def test_without_an_option_a_step_may_take_ten_times_the_longest() -> None:
    pace = Pace(first=1800, step=None, save=600)
    assert pace.limit("step", False, is_early=False)[0] == LEAST
    assert pace.limit("step", False, is_early=True)[0] == EARLY
    for seconds in (50.0, 20.0):
        pace.done("step", seconds, False)
    assert pace.limit("step", False, is_early=False)[0] == 500
    assert pace.limit("step", False, is_early=True)[0] == 500
    assert pace.limit("validation", False, is_early=False)[0] == EARLY


def test_where_steps_are_short_a_rank_that_hangs_is_named_within_a_minute() -> None:
    """The limit, the answers of all ranks, and the looks at the store."""
    pace = Pace(first=1800, step=None, save=600)
    for seconds in (0.2, 1.1, 0.3):
        pace.done("step", seconds, False)
    assert pace.limit("step", False, is_early=False)[0] + _ANSWER + 2 * 4 < 60


def test_steps_are_early_at_first_and_after_a_save_or_a_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a run that goes on after step 6, with a save after step 12, in which step 11 is run
    twice.
    """
    monkeypatch.setattr(watcher, "counts", lambda mesh: {})
    torch_dist: Any = dist
    watchdog = Watchdog(torch_dist.HashStore(), Mesh({}), 0, Pace(first=1800, step=None, save=600))
    before: list[tuple[Kind, int]] = [("step", step) for step in (7, 8, 9, 10, 11, 11, 12)]
    after: list[tuple[Kind, int]] = [("step", step) for step in (13, 14, 15, 16)]
    doing: list[tuple[Kind, int]] = [*before, ("save", 12), *after]
    seen = list[tuple[int, bool]]()
    for kind, step in doing:
        watchdog.begin(kind, step)
        seen.append((step, watchdog._mark.is_early))
    early = [step for step, is_early in seen if is_early]
    assert early == [7, 8, 9, 12, 13, 14]  # 12 is the save


@pytest.mark.parametrize(("priced", "second"), [(None, 6000), (3.0, 300), (0.1, LEAST)])
def test_a_first_step_counts_until_another_is_measured(priced: float | None, second: float) -> None:
    """And not where the step has a price."""
    pace = Pace(first=1800, step=None, save=600, priced=priced)
    pace.done("step", 600.0, True)
    pace.done("validation", 500.0, True)
    assert pace.limit("step", False, is_early=False)[0] == second
    pace.done("step", 20.0, False)
    assert pace.limit("step", False, is_early=False)[0] == 200
    assert pace.limit("validation", False, is_early=False)[0] == 5000


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
