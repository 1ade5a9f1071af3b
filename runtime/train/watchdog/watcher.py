"""The thread that watches a rank, and the few keys of the job's store that tell ranks of each
other's end.

    failed     the first cause: who, and why; or that a rank has come no further, which is the alarm
    positions  after an alarm, a line from each rank that answers: where it is
    verdict    the rank that the others wait for; the rank that has raised the alarm writes it

Load on the store: a rank reads one key a second.  More than 4,000 ranks read less often, so that
there are never more than 4,000 reads a second; a read takes about 10 µs of the store's time.  An
alarm costs each rank a line and a wait.  Nothing is written while all goes well.
"""

import json
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from traceback import walk_tb
from typing import Any, NoReturn

import torch.distributed as dist

from ...comm import c10d
from ...comm.mesh import Mesh
from ...comm.store import FAILED, READS, job_store
from ...config.plan import Plan
from ..launch import flight_record
from ..options import Options
from ..shutdown import keeps_store, tell_launcher
from .limits import EARLY_STEPS, Kind, Pace, Patience
from .position import counts, position
from .verdict import Position, Verdict, describe_ranks, find_awaited_ranks, judge, read_positions

_ANSWER = 10.0  # seconds in which a rank answers an alarm
_BEGINNING = 0.1  # seconds between looks for the neighbour's process
_QUIET = 1.0  # seconds that one rank leaves the others, or the launcher, to be first
_READ = 3.0  # seconds in which others read the verdict, where the store ends with this process
_POSITIONS, _ANSWERS, _VERDICT, _RANKS, _LEFT = "positions", "answers", "verdict", "ranks", "ended"


@dataclass(frozen=True, eq=False, slots=True)
class _Mark:
    """The beginning of what a rank does, and how many calls its groups had made then.

    `is_first`: it is the first of its kind in this run.  `is_early`: it is an early step, as
    `EARLY` of limits describes.
    """

    kind: Kind
    step: int
    is_first: bool
    is_early: bool
    before: Mapping[Any, int]

    def __str__(self) -> str:
        after = f"after step {self.step}"
        return {
            "start": "the start",
            "step": f"step {self.step}",
            "validation": f"validation {after}",
            "save": f"the save {after}",
            "end": "the end",
        }[self.kind]


class Watchdog:
    """Watches this rank, from `start` to `stop`.  In a step the main thread calls only `begin`,
    once.
    """

    def __init__(
        self,
        store: Any,
        mesh: Mesh,
        rank: int,
        pace: Pace,
        interval: float | None = None,
        folder: Path | None = None,
    ) -> None:
        """`store` is a client of the watchdog's thread alone: a client waits with its lock taken.

        The record of the last calls is written to `folder`.
        """
        self._folder = folder
        self._store, self._mesh, self._rank, self._pace = store, mesh, rank, pace
        self._world = mesh.size(*mesh.axes)
        self._interval = interval or max(1.0, self._world / READS)
        self._host = gethostname()
        self._mark = _Mark("start", 0, True, True, {})
        self._begun = set[Kind]()
        self._last_early = 0
        self._lost: BaseException | None = None  # of a call of the main thread to other ranks
        self._ending = threading.Event()
        self._neighbour = _Neighbour(store, rank)
        self._patience = Patience(self._leave, self._ending, self._interval)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._store.append(_RANKS, f"{self._rank} {self._host}\n")
        self._thread.start()
        self._patience.start()

    def begin(self, kind: Kind, step: int) -> None:
        """Notes that the main thread goes on to a step, or to what follows it.

        Takes about 0.7 µs per group.
        """
        is_first = kind not in self._begun
        if is_first or kind != "step":
            self._last_early = step + EARLY_STEPS
        self._mark = _Mark(kind, step, is_first, step <= self._last_early, counts(self._mesh))
        self._begun.add(kind)

    def stop(self) -> None:
        """Ends the watch: all ranks have come to their end."""
        self._store.set(f"{_LEFT}/{self._rank}", "")
        self._ending.set()
        self._thread.join()

    # ---- of the main thread, which fails

    def report_failure(self, reason: str) -> str:
        """Tells the others that this rank fails, so that all end.

        Returns the words about another rank, if that one has failed before, else "".
        """
        self._ending.set()
        self._thread.join(_ANSWER)
        first = self._first("failed", reason)
        if first["rank"] == self._rank:
            return ""
        if first["kind"] == "alarm":
            self._answer(Position(self._rank, self._host, f"{self._mark}", failed=reason))
        return _describe_cause(first)

    def report_lost(self, error: BaseException) -> NoReturn:
        """Leaves it to the thread to find out why a call to other ranks has failed, and to end all:
        one of them may have ended.
        """
        self._lost = error
        # a launcher that sees that a rank has ended sends this signal to the others
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(6 * _ANSWER)
        os._exit(1)

    # ---- of the thread

    def _watch(self) -> None:
        mark, passed, last = self._mark, 0.0, time.monotonic()
        while not self._ending.wait(self._interval if self._neighbour.is_known else _BEGINNING):
            now = time.monotonic()
            # a process that was stopped accuses nobody
            gap, last = min(now - last, 2 * self._interval), now
            if self._mark is not mark:
                self._pace.done(mark.kind, passed + gap, mark.is_first)
                mark, passed = self._mark, 0.0
            passed += gap
            with self._patience.request():
                self._look(mark, passed)

    def _look(self, mark: _Mark, passed: float) -> None:
        limit, option = self._pace.limit(mark.kind, mark.is_first, mark.is_early)
        try:
            if self._store.check([FAILED]):
                self._follow(json.loads(self._store.get(FAILED)))
            elif self._neighbour.is_gone():
                self._alarm(f"the process of rank {self._neighbour.rank} has ended")
            elif self._lost is not None:
                self._alarm(f"a call to other ranks fails: {_first_sentence(self._lost)}")
            elif passed > limit:
                self._alarm(f"{mark} is not done after {passed:.0f} s ({option})")
        except RuntimeError as error:  # of a store
            if not self._ending.is_set():
                self._leave(
                    "lost the job's store, whose machine or launcher has ended:"
                    f" {_first_sentence(error)}"
                )

    def _first(self, kind: str, reason: str) -> dict[str, Any]:
        """The first cause that any rank has written; this one if there is none."""
        cause = {"kind": kind, "rank": self._rank, "host": self._host, "reason": reason}
        try:
            return json.loads(self._store.compare_set(FAILED, "", json.dumps(cause)))
        except RuntimeError:  # the store is gone with the rank that kept it
            return cause | {"rank": -1}

    def _alarm(self, reason: str) -> None:
        self._follow(self._first("alarm", reason))

    def _follow(self, first: Mapping[str, Any]) -> None:
        """Ends this rank, after the first cause; quietly, if the rank that failed tells it."""
        if first["kind"] == "failed":
            time.sleep(_QUIET)
            self._leave(_describe_cause(first), quietly=True)
        own_position = self._position()
        self._answer(own_position)
        verdict = self._judge_all() if first["rank"] == self._rank else self._await_verdict()
        if self._neighbour.rank in verdict.silent:
            self._neighbour.kill()
        self._leave(
            f"{_words(self._mesh, own_position, verdict)}\n  {_describe_cause(first)};"
            f" {verdict.text}{self._write_record()}"
        )

    def _write_record(self) -> str:
        """Writes torch's record of this rank's last calls, and says where; "" where there is
        none.
        """
        if self._folder is None:
            return ""
        record = c10d.flight_record()
        if not record:
            return ""
        try:
            flight_record(self._folder, self._rank).write_bytes(record)
        except OSError:
            return ""
        return f"\n  torch's record of the last calls: {flight_record(self._folder)}RANK"

    def _position(self) -> Position:
        """Where this rank is; an error in finding it out must not keep the rank from its end."""
        mark, silent = self._mark, self._neighbour.silent()
        lost_frames = None
        if self._lost is not None:
            lost_frames = [*walk_tb(self._lost.__traceback__)][::-1]
        try:
            evaluates = mark.kind == "validation"
            own_position = position(
                self._mesh, self._host, self._rank, f"{mark}", evaluates, mark.before, lost_frames
            )
            return replace(own_position, silent=silent)
        except Exception as error:
            return Position(
                self._rank,
                self._host,
                f"{mark}",
                code=f"a place not found: {error!r}",
                silent=silent,
            )

    def _answer(self, own_position: Position) -> None:
        self._store.append(_POSITIONS, json.dumps(asdict(own_position)) + "\n")
        self._store.add(_ANSWERS, 1 + len(own_position.silent))

    def _judge_all(self) -> Verdict:
        """Judges by the positions of the ranks that answer in time, and tells the verdict to the
        others.
        """
        until = time.monotonic() + _ANSWER + 2 * self._interval
        while self._store.add(_ANSWERS, 0) < self._world and time.monotonic() < until:
            time.sleep(0.1)
        hosts = dict[int, str]()
        for line in self._store.get(_RANKS).decode().splitlines():
            rank, host = line.split()
            hosts[int(rank)] = host
        verdict = judge(
            self._mesh.axes, read_positions(self._store.get(_POSITIONS).decode()), hosts
        )
        self._store.set(_VERDICT, json.dumps(asdict(verdict)))
        return verdict

    def _await_verdict(self) -> Verdict:
        """Waits for the verdict of the rank that has raised the alarm."""
        try:
            self._store.wait([_VERDICT], timedelta(seconds=2 * (_ANSWER + 2 * self._interval)))
        except RuntimeError:
            return Verdict((), "the rank that has raised the alarm tells nothing more")
        return Verdict(**json.loads(self._store.get(_VERDICT)))

    def _leave(self, words: str, quietly: bool = False) -> NoReturn:
        """Ends this process, without anything that could wait for its main thread."""
        tell_launcher(words)
        if not quietly:
            with suppress(OSError):
                # `print` would wait for a lock that the main thread may have taken
                os.write(2, f"error: {words}\n".encode())
            time.sleep(_QUIET)  # others tell where they are before a launcher ends them
        if keeps_store():
            time.sleep(_READ)
        os._exit(1)


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).partition(". This is ")[0][:200]


def _describe_cause(first: Mapping[str, Any]) -> str:
    """The first cause, with its rank and host."""
    reason = first["reason"]
    if first["rank"] < 0:
        return f"{reason} (and the job's store is gone)"
    rank = f"rank {first['rank']}"
    if reason.startswith(rank):
        return reason
    return f"{rank} on {first['host']}: {reason}"


def _words(mesh: Mesh, own_position: Position, verdict: Verdict) -> str:
    """Where this rank is, and for whom it waits."""
    head = f"rank {own_position.rank} on {own_position.host}, {own_position.doing}"
    if not own_position.waiting:
        return f"{head}: at {own_position.code}"
    others = find_awaited_ranks(mesh.axes, own_position)
    missing = [rank for rank in others if rank in verdict.missing]
    whom = f" for {describe_ranks(missing or others)}" if others else ""
    call = own_position.call or "a call"
    return f"{head}: waits{whom} in {call}; {own_position.code}"


def watch(mesh: Mesh, plan: Plan, options: Options) -> Watchdog | None:
    """Begins to watch this rank; None where there are no others."""
    store = job_store()
    if store is None:
        return None
    priced, expected = None, plan.prediction.expected
    if expected and options.device == "cuda":  # the price is for the plan's GPUs
        priced = expected.seconds
    pace = Pace(
        first=options.first_step_limit,
        step=options.step_limit,
        save=options.save_limit,
        priced=priced,
    )
    watchdog = Watchdog(store.clone(), mesh, dist.get_rank(), pace, folder=options.out)
    watchdog.start()
    return watchdog


class _Neighbour:
    """The next rank of this machine; this rank sees its end without the store."""

    def __init__(self, store: Any, rank: int) -> None:
        local = int(os.environ.get("LOCAL_RANK", 0))
        size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.rank = rank - local + (local + 1) % size
        self._store, self._alone = store, size == 1
        self._process: tuple[int, int] | None = None  # its id, and a descriptor of it
        store.set(f"pid/{rank}", str(os.getpid()))

    @property
    def is_known(self) -> bool:
        """Whether its process is known, or never will be."""
        return self._alone or self._process is not None

    def is_gone(self) -> bool:
        """Whether its process has ended before the rank had come to its end."""
        if self._process is None and not self._alone and self._store.check([f"pid/{self.rank}"]):
            number = int(self._store.get(f"pid/{self.rank}"))
            try:
                self._process = number, os.pidfd_open(number)
            except OSError:  # it is in a container of its own
                self._alone = True
        if self._process is None:
            return False
        has_ended = bool(select.select([self._process[1]], [], [], 0)[0])
        return has_ended and not self._store.check([f"{_LEFT}/{self.rank}"])

    def silent(self) -> list[tuple[int, str]]:
        """The rank, and why it will not answer, if it will not."""
        reason = ""
        if self.is_gone():
            reason = "is gone: its process ended without a word, as one that was killed does"
        elif self._process is not None and _is_stopped(self._process[0]):
            reason = "does not answer: its process is stopped, as by SIGSTOP or a debugger"
        return [(self.rank, reason)] if reason else []

    def kill(self) -> None:
        """Ends a rank that cannot end itself, as it is stopped or holds Python's lock: launchers
        wait long for such a rank.
        """
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process[1], signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
