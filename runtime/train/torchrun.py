"""Runs torchrun and ends with the line that explains a failure: `python -m
scalec.runtime.train.torchrun`.
"""

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, cast

from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ..config.interrupts import are_blocked, blocked, hear
from .options import SEPARATE_STORES
from .stop import INTERRUPTED, SAVED

_SIGNALS = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
}
"""Signals that torchrun hands on to ranks, and the seconds that they have to save."""


def main() -> None:
    """Runs torchrun with this process' arguments.

    Exit status 1 where a rank failed, 75 where a signal has ended the run, which goes on by the
    same line.
    """
    torchrun = cast(Any, run)
    _tell_stops()
    if are_blocked():
        _start_ranks_blocked()
    for name, value in _SIGNALS.items():
        os.environ.setdefault(name, value)
    try:
        hear()
        asked = torchrun.parse_args(sys.argv[1:])
        if asked.max_restarts:
            os.environ.setdefault(*SEPARATE_STORES.split("="))
        torchrun.run(asked)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SignalException as error:
        sys.exit(INTERRUPTED if error.sigval == signal.SIGINT else SAVED)
    except ChildFailedError as error:
        rank, failure = first(error.failures)
        code = failure.exitcode
        ended = (
            f"was ended by {failure.signal_name()}"
            if code < 0
            else f"ended with exit status {code}"
        )
        print(f"{error}\nerror: {_told(failure) or f'rank {rank} {ended}'}", file=sys.stderr)
        sys.exit(1)


def _tell_stops() -> None:
    """Has torchrun end as by a signal where ranks end that have all saved: it would take them
    to have failed.
    """
    agent: Any = LocalElasticAgent
    monitor: Any = agent._monitor_workers

    def monitored(self: object, group: object) -> Any:
        result = monitor(self, group)
        # of ranks about to end
        ends = {failure.exitcode for failure in result.failures.values()} - {-signal.SIGTERM}
        if ends in ({SAVED}, {INTERRUPTED}):
            raise SignalException(
                "all ranks have saved", signal.SIGTERM if ends == {SAVED} else signal.SIGINT
            )
        return result

    agent._monitor_workers = monitored


def _start_ranks_blocked() -> None:
    """Has torchrun start its ranks with SIGINT blocked, until they have imported torch."""
    agent: Any = LocalElasticAgent
    start: Any = agent._start_workers

    def started(self: object, group: object) -> Any:
        with blocked():
            return start(self, group)

    agent._start_workers = started


def first(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure explains the others: the first that has told why, or else one that was
    killed.

    Ranks that lose a killed one name it; and one that a watchdog has ended, as it was stopped,
    explains nothing.
    """
    return min(
        failures.items(),
        key=lambda each: (not _told(each[1]), not _was_killed(each[1]), int(each[1].timestamp)),
    )


def _was_killed(failure: ProcessFailure) -> bool:
    """Whether another than torchrun, which ends ranks by SIGTERM, ended a rank: others only
    lost it.
    """
    return failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM


def _told(failure: ProcessFailure) -> str:
    """The rank's own words (`shutdown.tell_launcher`); "" where it has left none."""
    match failure.error_file_data:
        case {"message": {"message": str(said)}}:
            return said
        case _:
            return ""


if __name__ == "__main__":
    main()
