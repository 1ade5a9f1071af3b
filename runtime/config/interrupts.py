"""Ctrl-C before a run begins: while Python imports torch an interrupt would end each process with a
traceback.

`scalec run` starts its launcher with the signal blocked, and the launcher its ranks.  Each process
takes the signal when it has imported everything.
"""

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def block_interrupts() -> Generator[None]:
    """Blocks SIGINT inside the block, also for processes that this thread starts there.  A SIGINT
    that comes meanwhile is taken after the block.
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
    """Lets SIGINT end this rank at once, also in calls that wait for other ranks, until its run
    listens to signals.

    A rank that was started without SIGINT blocked is left as it is.
    """
    if are_blocked():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        unblock_interrupts()


def unblock_interrupts() -> None:
    """Takes SIGINT from now on.  KeyboardInterrupt where one has come since this process began."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
