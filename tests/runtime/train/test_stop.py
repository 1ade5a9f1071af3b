"""A signal to one rank stops all after the same step, and the run goes on as if nothing had
happened.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.forked_ranks import run_ranks
from scalec.runtime.train.stop import Stop


def _loop(signalled: list[tuple[int, int, int]], coupled: bool) -> tuple[int, str]:
    """Steps of ranks, some of which are faster; `signalled`: rank, step and signal.

    The last step, and the signal.
    """
    rank, stop = dist.get_rank(), Stop(0)
    with stop.listening():
        for done in range(1, 10_000):
            for who, at, number in signalled:
                if (who, at) == (rank, done):
                    os.kill(os.getpid(), number)
            if coupled:
                dist.barrier()
            else:
                time.sleep(0.01 * (1 + rank))
            if stop.after(done):
                return done, stop.signal
    return 0, ""


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("signalled", "coupled"),
    [
        ([(1, 3, TERM)], True),
        ([(2, 3, USR1)], False),
        ([(0, 5, TERM), (1, 5, TERM), (2, 5, TERM)], True),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    signalled: list[tuple[int, int, int]], coupled: bool
) -> None:
    found = run_ranks(3, _loop, signalled, coupled)
    ((last, by),) = {*found}
    assert last > max(at for _, at, _ in signalled)
    assert by == signal.Signals(signalled[0][2]).name


def test_a_process_alone_stops_too() -> None:
    stop = Stop(5)
    with stop.listening():
        os.kill(os.getpid(), TERM)
        ends = next(done for done in range(6, 1_000_000) if time.sleep(0.001) or stop.after(done))
    assert ends > 6
    assert (stop.signal, stop.status) == ("SIGTERM", 75)


def test_without_a_signal_nothing_stops(tmp_path: Path) -> None:
    stop = Stop(0)
    with stop.listening():
        assert not any(stop.after(done) for done in range(1, 1000))
