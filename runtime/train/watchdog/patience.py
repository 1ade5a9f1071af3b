"""A store that does not answer, as where its process is stopped or its machine is gone: a request waits without limit.

A connection whose other end has lost power says nothing, and torch gives such requests no time of their own.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

DEAF = 60.0
"""Seconds that a request may take: more than a watchdog's own waits do."""


class Patience:
    """Calls `leave` with the reason, on a thread of its own, where a request of the watchdog's takes too long."""

    def __init__(self, leave: Callable[[str], object], ending: threading.Event, interval: float) -> None:
        self._leave, self._ending, self._interval = leave, ending, interval
        self._requests, self._waits = 0, False
        self._thread = threading.Thread(target=self._count, name="watchdog's patience", daemon=True)

    def start(self) -> None:
        """Begins to count."""
        self._thread.start()

    @contextmanager
    def request(self) -> Generator[None]:
        """A request is made while entered."""
        self._requests, self._waits = self._requests + 1, True
        try:
            yield
        finally:
            self._waits = False

    def _count(self) -> None:
        seen, passed, last = self._requests, 0.0, time.monotonic()
        while not self._ending.wait(self._interval):
            now = time.monotonic()
            gap, last = min(now - last, 5 * self._interval), now  # a process that was stopped blames nobody
            passed = passed + gap if self._waits and self._requests == seen else 0.0
            seen = self._requests
            if passed > DEAF:
                keeper = "rank 0 or the launcher, which keeps it, is stopped, or its machine is gone"
                self._leave(f"the job's store has not answered for {passed:.0f} s: {keeper}")
