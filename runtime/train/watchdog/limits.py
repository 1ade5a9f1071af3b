"""Time limits of a run, in seconds: how long a rank may make no progress, and how long the job's
store may give no answer.

The store does not answer where its process is stopped or its machine is gone, and a request waits
without limit: a connection whose other end has lost power says nothing, and torch sets no time
limit for such requests.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ...checkpoint.background import PAUSES

Kind = Literal["start", "step", "validation", "save", "end"]

LEAST = 30.0
"""The shortest limit of a step where no option sets one: other ranks may be slow for a while."""
EARLY = 120.0
"""The shortest limit of a validation and of an early step: the first ones of a run, and the first
ones after a save or a validation.

Ranks reach these steps at different times: one may pin memory, read a file for the first time, or
compile.
"""
EARLY_STEPS = 2
"""How many steps after the first one, or after a save or a validation, are early.

A GPU's host may be two steps ahead of a rank that it waits for.
"""
TIMES = 10
"""A step may take this many times as long as the longest so far."""
WIDE = 10
"""A step may take this many times as long as the compiler has priced it, before one has been
measured.
"""
DEAF = 60.0
"""Seconds that a request may take: more than the watchdog's own waits take."""


@dataclass(kw_only=True)
class Pace:
    """The time limit of what a rank is doing, by options and by how long it took before.

    All times are in seconds.  The option `first` holds for everything until the first step is
    done.  Without the option `step`, the steps so far decide a step's limit.

    The first step and the first validation may have to compile, and to make communicators.  So
    their times count only until another one is measured, and a first step's time does not count at
    all where the compiler has `priced` a step.
    """

    first: float
    step: float | None
    save: float
    priced: float | None = None
    _first_ones: dict[Kind, float] = field(default_factory=dict[Kind, float])
    _longest: dict[Kind, float] = field(default_factory=dict[Kind, float])

    def done(self, kind: Kind, seconds: float, is_first: bool) -> None:
        """Notes that something of this kind took so many seconds."""
        longest = self._first_ones if is_first else self._longest
        longest[kind] = max(seconds, longest.get(kind, 0.0))

    def limit(self, kind: Kind, is_first: bool, is_early: bool) -> tuple[float, str]:
        """The limit in seconds, and the option that sets it.

        `is_first` says that it is the first of its kind in this run, `is_early` that it is an early
        step, as EARLY describes.
        """
        if kind in ("save", "end"):
            # a save pauses between its tries
            return self.save + sum(PAUSES), f"--save-limit {self.save:.0f}"
        if kind == "start" or is_first:
            return self.first, f"--first-step-limit {self.first:.0f}"
        least = EARLY if is_early or kind == "validation" else LEAST
        most = self.step or max(least, TIMES * self._before(kind))
        return most, f"--step-limit {most:.0f}"

    def _before(self, kind: Kind) -> float:
        """Seconds of the longest one so far; before a step is measured, a generous guess."""
        if kind not in self._longest and kind == "step" and self.priced is not None:
            return WIDE * self.priced
        return self._longest.get(kind, self._first_ones.get(kind, 0.0))


class Patience:
    """Calls `leave` with the reason, on its own thread, where a request of the watchdog takes too
    long.
    """

    def __init__(
        self, leave: Callable[[str], object], ending: threading.Event, interval: float
    ) -> None:
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
        counted_requests, passed, last = self._requests, 0.0, time.monotonic()
        while not self._ending.wait(self._interval):
            now = time.monotonic()
            # a process that was stopped blames nobody
            gap, last = min(now - last, 5 * self._interval), now
            if self._waits and self._requests == counted_requests:
                passed += gap
            else:
                passed = 0.0
            counted_requests = self._requests
            if passed > DEAF:
                keeper = (
                    "rank 0 or the launcher, which keeps it, is stopped, or its machine is gone"
                )
                self._leave(f"the job's store has not answered for {passed:.0f} s: {keeper}")
