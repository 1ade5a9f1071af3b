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

from ..config.interrupts import are_blocked, block_interrupts, unblock_interrupts
from .options import SEPARATE_STORES
from .stop import INTERRUPTED, SAVED

_SIGNALS = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
}
"""Torch's variables for the signals that torchrun hands on to ranks, and for the seconds that the
ranks have to save.
"""


def main() -> None:
    """Runs torchrun with this process' arguments.

    Exit status 1 where a rank failed, 75 where a signal has ended the run; the same command goes on
    with it.
    """
    torchrun = cast(Any, run)
    _tell_stops()
    if are_blocked():
        _start_ranks_blocked()
    for name, value in _SIGNALS.items():
        os.environ.setdefault(name, value)
    try:
        unblock_interrupts()
        arguments = torchrun.parse_args(sys.argv[1:])
        if arguments.max_restarts:
            os.environ.setdefault(*SEPARATE_STORES.split("="))
        torchrun.run(arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SignalException as error:
        sys.exit(INTERRUPTED if error.sigval == signal.SIGINT else SAVED)
    except ChildFailedError as error:
        rank, failure = find_first_failure(error.failures)
        if failure.exitcode < 0:
            line = f"rank {rank} was ended by {failure.signal_name()}"
        else:
            line = f"rank {rank} ended with exit status {failure.exitcode}"
        print(f"{error}\nerror: {_get_own_words(failure) or line}", file=sys.stderr)
        sys.exit(1)


def _tell_stops() -> None:
    """Has torchrun end as by a signal where all ranks have saved and end: otherwise it would take
    them to have failed.
    """
    agent: Any = LocalElasticAgent
    monitor: Any = agent._monitor_workers

    def monitor_workers(self: object, group: object) -> Any:
        result = monitor(self, group)
        # torchrun ends the ranks that are about to end
        ends = {failure.exitcode for failure in result.failures.values()} - {-signal.SIGTERM}
        if ends == {SAVED}:
            raise SignalException("all ranks have saved", signal.SIGTERM)
        if ends == {INTERRUPTED}:
            raise SignalException("all ranks have saved", signal.SIGINT)
        return result

    agent._monitor_workers = monitor_workers


def _start_ranks_blocked() -> None:
    """Has torchrun start its ranks with SIGINT blocked, until they have imported torch."""
    agent: Any = LocalElasticAgent
    start: Any = agent._start_workers

    def start_workers(self: object, group: object) -> Any:
        with block_interrupts():
            return start(self, group)

    agent._start_workers = start_workers


def find_first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure explains the others, and the failure: the first that has told why, or
    else one that was killed.

    Ranks that lose a killed rank name it.  A rank that a watchdog has ended, as it was stopped,
    explains nothing.
    """

    def precedence(rank_and_failure: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        _, failure = rank_and_failure
        return not _get_own_words(failure), not _was_killed(failure), int(failure.timestamp)

    return min(failures.items(), key=precedence)


def _was_killed(failure: ProcessFailure) -> bool:
    """Whether a signal ended a rank that torchrun, which sends SIGTERM, did not send: other ranks
    only lost this one.
    """
    return failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM


def _get_own_words(failure: ProcessFailure) -> str:
    """The rank's own words (`shutdown.tell_launcher`); "" where it has left none."""
    match failure.error_file_data:
        case {"message": {"message": str(message)}}:
            return message
        case _:
            return ""


if __name__ == "__main__":
    main()
