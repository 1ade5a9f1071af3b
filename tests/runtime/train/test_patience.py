"""A store that does not answer is told, once its time has passed; one that has answered is not."""

import threading

import pytest

from scalec.runtime.train.watchdog import limits
from scalec.runtime.train.watchdog.limits import Patience


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
