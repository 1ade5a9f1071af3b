"""A stop by a signal: all ranks save and end after the same step, whichever of them was signalled.

A rank that is signalled says so in the job's store.  Each rank's thread then promises how far its
rank goes without asking: one step more than it has begun.  The largest promise is the last step of
all ranks.  No rank waits within a step, so none waits for another that waits for it, and no
collective takes part.

Load on the store: a rank reads one key a second; more than 4,000 ranks read less often.  For a stop
a rank sends five requests, and reads until the last rank has promised; more than 400 ranks read at
most 4,000 times a second together.
"""

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from ..comm.store import READS, job_store

SAVED = 75
"""Exit status of a run that a signal has stopped and that goes on by the same line: EX_TEMPFAIL
of sysexits.h.
"""
INTERRUPTED = 130
"""Exit status of a run that Ctrl-C has stopped."""

_SIGNALS = {"SIGTERM": SAVED, "SIGUSR1": SAVED, "SIGINT": INTERRUPTED}
_TWICE = 2.0  # seconds after a Ctrl-C in which another is its echo: torchrun hands it on
_ASKED, _PROMISES, _PROMISED, _LAST = "stop", "stop/promises", "stop/promised", "stop/last"


class Stopped(Exception):
    """Says that all ranks have saved, and end with this status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class Stop:
    """A rank's knowledge of a stop: the main thread asks it after each step, another thread looks
    at the store.
    """

    def __init__(self, first: int) -> None:
        """`first` steps are done when the run begins."""
        self._begun, self._promise, self._last = first + 1, 0, 0  # steps; 0: none
        self._own_signal, self._signal_time = "", 0.0  # the signal that this rank has got, and when
        self.signal = ""
        """The signal that stops the run, once it is known."""
        self._lock, self._is_known, self._ends = (
            threading.Lock(),
            threading.Event(),
            threading.Event(),
        )
        store = job_store()
        self._store: Any = None
        self._world = 1
        if store:
            self._store, self._world = store.clone(), dist.get_world_size()

    @contextmanager
    def listening(self) -> Generator[None]:
        """Listens to signals while entered, except to signals that a shell has it ignore."""
        handlers_before = dict[signal.Signals, Any]()
        for name in _SIGNALS:
            number = signal.Signals[name]
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers_before[number] = signal.signal(number, self._handle_signal)
        thread = threading.Thread(target=self._look, name="stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for number, handler in handlers_before.items():
                signal.signal(number, handler)

    def after(self, steps_done: int) -> bool:
        """Whether the run ends after `done` steps; if it does not, the next step has begun."""
        with self._lock:
            if not self._promise or (steps_done < self._promise and not self._last):
                self._begun = steps_done + 1
                return False
        self._is_known.wait()
        return steps_done >= self._last

    @property
    def status(self) -> int:
        """The exit status of a run that this signal ends."""
        return _SIGNALS[self.signal]

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        """Handles a signal in the main thread, which may hold any lock.

        A second Ctrl-C ends the rank at once.
        """
        now = time.monotonic()
        if self._own_signal and number == signal.SIGINT and now - self._signal_time > _TWICE:
            raise KeyboardInterrupt
        if not self._own_signal:
            self._own_signal, self._signal_time = signal.Signals(number).name, now

    def _look(self) -> None:
        """Runs in the thread: looks for a signal of this rank or of another."""
        while not self._ends.wait(max(1.0, self._world / READS)):
            if self._store is None:
                if self._own_signal:
                    return self._set_last_step(self._promise_more(), self._own_signal)
                continue
            if self._own_signal:
                self._store.compare_set(_ASKED, "", self._own_signal)
            if self._store.check([_ASKED]):
                return self._agree()

    def _agree(self) -> None:
        """Promises, and learns of the largest promise."""
        store, promise = self._store, self._promise_more()
        store.append(_PROMISES, f"{promise} ")
        if store.add(_PROMISED, 1) == self._world:  # this rank is the last to promise
            store.set(_LAST, str(max(map(int, store.get(_PROMISES).split()))))
        while not store.check([_LAST]):
            if self._ends.wait(max(0.1, self._world / READS)):
                return
        self._set_last_step(int(store.get(_LAST)), store.get(_ASKED).decode())

    def _promise_more(self) -> int:
        """The last step that the main thread begins without asking: one more than it has begun."""
        with self._lock:
            self._promise = self._begun + 1
            return self._promise

    def _set_last_step(self, last: int, by: str) -> None:
        """Takes note of the last step of all ranks, and of the signal."""
        self._last, self.signal = last, by
        self._is_known.set()
