"""Ctrl-C before a run begins: while Python imports torch an interrupt would end each process with a
traceback.

`scalec run` starts its launcher, and that its ranks, with the signal blocked; each takes it when it
has imported all.
"""

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def blocked() -> Generator[None]:
    """Processes that this thread starts meanwhile have SIGINT blocked; one that comes meanwhile
    is taken after.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def are_blocked() -> bool:
    """Whether this process was started with SIGINT blocked, and has not heard it yet."""
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def end_at_once() -> None:
    """Has SIGINT end this rank at once until its run listens to signals, in calls that wait for
    other ranks too.

    One that was started otherwise is left as it is.
    """
    if are_blocked():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        hear()


def hear() -> None:
    """Takes SIGINT from now on.  KeyboardInterrupt where one has come since this process began."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
