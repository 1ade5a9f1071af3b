"""Runs in which a rank stops, sleeps, dies, fails, is slow or is another program: all end, and name it.

Limits are for the ranks that wait; nothing here has to be fast.  A run that goes on is ended after minutes, and fails.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from helpers.faulty_ranks import Ended, at_step, run, stop
from helpers.forked_ranks import plain_groups
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text

DATA = Case(dp=2)


OPTIONS = "--data=corpus.bin --device=cpu --steps=4 --log-every=1 --step-limit=5 --first-step-limit=60"


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Groups count calls themselves, which torch's wrapper for debugging does not pass on."""
    with plain_groups():
        yield


def _ended(case: Case, folder: Path, bad: int, misbehave: Callable[[], object], left: bool = False) -> list[Ended]:
    harness.written(plan_text(case), folder)
    (folder / "corpus.bin").write_bytes(bytes(i * 7 % 32 for i in range(8000)))

    def prepare(rank: int) -> str | None:
        if rank == bad:
            misbehave()
        return None

    return run(folder, case.ranks, OPTIONS, prepare, bad if left else -1)


def _blamed(ended: Sequence[Ended], bad: int, *words: str) -> None:
    """All others have ended with a status, and name the rank."""
    for rank, each in enumerate(ended):
        if rank != bad:
            assert each.status == 1, each.error
            for word in words:
                assert word in each.error, each.error


def test_a_stopped_rank(tmp_path: Path) -> None:
    ended = _ended(DATA, tmp_path, 1, partial(at_step, 3, stop), left=True)
    assert ended[1].status is None
    call = "waits for rank 1 in all_reduce of `num_tokens.1` over dp, tiny.scale:1"
    _blamed(ended, 1, "step 3: ", call, "not done after", "(--step-limit 5)", "rank 1 on ", "its process is stopped")
