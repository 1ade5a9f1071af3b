"""Runs torchrun and ends with the line that explains a failure: `python -m scalec.runtime.train.torchrun`."""

import os
import signal
import sys
from typing import Any, cast

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from .stop import INTERRUPTED, SAVED

_SIGNALS = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
"""Signals that torchrun hands on to ranks, and the seconds that they have to save."""


def main() -> None:
    """Runs torchrun with this process' arguments.

    Exit status 1 where a rank failed, 75 where a signal has ended the run, which goes on by the same line.
    """
    torchrun = cast(Any, run)
    for name, value in _SIGNALS.items():
        os.environ.setdefault(name, value)
    try:
        torchrun.run(torchrun.parse_args(sys.argv[1:]))
    except SignalException as error:
        sys.exit(INTERRUPTED if error.sigval == signal.SIGINT else SAVED)
    except ChildFailedError as error:
        if {failure.exitcode for failure in error.failures.values()} == {SAVED}:
            sys.exit(SAVED)
        rank, failure = min(error.failures.items(), key=lambda each: (not _was_killed(each[1]), each[1].timestamp))
        print(f"{error}\nerror: {_reason(rank, failure)}", file=sys.stderr)
        sys.exit(1)


def _was_killed(failure: ProcessFailure) -> bool:
    """Whether another than torchrun, which ends ranks by SIGTERM, ended a rank: others only lost it."""
    return failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM


def _reason(rank: int, failure: ProcessFailure) -> str:
    """The rank's own words (`shutdown.tell_launcher`), or else how it ended."""
    match failure.error_file_data:
        case {"message": {"message": str(said)}}:
            return said
        case _ if failure.exitcode < 0:
            return f"rank {rank} was ended by {failure.signal_name()}"
        case _:
            return f"rank {rank} ended with exit status {failure.exitcode}"


if __name__ == "__main__":
    main()
