"""The folder of a run: its lock, which rank 0 holds, the claim of a start, and a check that all
nodes have the same folder.

The lock is an flock: the kernel releases it however the process ends.  A lock with a heartbeat
would have to be judged stale by clocks.  Linux has flock on NFS (among all clients, since 2.6.12),
on GPFS, and on Lustre that is mounted with `flock`; where a file system lacks it, a warning says
so.

The last start has the claim, and an earlier start that still trains ends: torchrun, or a person,
may start ranks anew while others, which they have lost sight of, train on.
"""

import errno
import fcntl
import json
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from socket import gethostname
from time import monotonic, sleep
from typing import Any

from ..checkpoint.agreement import together
from ..comm.store import job_store
from ..config.plan import Plan
from ..errors import RunError
from .launch import check_folder, environment, is_first
from .options import loses_nodes

LOCK = "lock"
"""The file that says who holds the lock, or held it last."""

CLAIM = "claim"
"""The file that names the last start."""

# seconds for an earlier start of this job to end, and for a file to be seen on all nodes
_PATIENCE = 10.0
_EVERY = 1.0  # seconds between two looks at the claim
_UNABLE = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class Lock:
    """The lock of a run's folder, which this process holds until it ends."""

    def __init__(self, folder: Path, job: str) -> None:
        """Takes the lock; `job` is the name that all starts of a job share, or "".  OSError;
        RunError where another run has the lock.

        An earlier start of the job, which may be out of sight of its launcher, keeps the lock until
        it ends: see `wait`.
        """
        self._folder, self._job = folder, job
        # NFS locks only files that are open for writing
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self.warning = ""
        self.is_taken = self._try()
        if not self.is_taken:
            self._require_same_job()

    def _require_same_job(self) -> None:
        """RunError unless an earlier start of this job holds the lock."""
        holder = self._holder()
        if self._job and holder.get("job") == self._job:
            return
        who = (
            f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since"
            f" {holder.get('since', '?')}"
        )
        raise RunError(
            f"another run has the folder {self._folder}: {who}",
            "end that one, or choose another --out",
        )

    def wait(self) -> None:
        """Waits a little for the earlier start to end."""
        until = monotonic() + _PATIENCE
        while not self.is_taken and monotonic() < until:
            sleep(0.1)
            self.is_taken = self._try()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            self.warning = (
                f"warning: the file system of {self._folder} has no locks: a second run is not"
                " kept out"
            )
        since = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
        holder = {"host": gethostname(), "pid": os.getpid(), "since": since, "job": self._job}
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(json.dumps(holder).encode() + b"\n")
        return True

    def _holder(self) -> dict[str, Any]:
        try:
            return json.loads(self._file.read())
        except ValueError:  # it is being written
            return {}


class Claim:
    """One start's claim to the folder, which its first rank keeps."""

    def __init__(self, folder: Path) -> None:
        """Takes the claim from any earlier start.  OSError."""
        self._file, self.word, self._seen = folder / CLAIM, os.urandom(8).hex(), monotonic()
        draft = self._file.with_suffix(f".{self.word}")
        draft.write_text(self.word)
        draft.replace(self._file)

    def check(self, now: bool = False) -> None:
        """RunError where a later start has the claim.

        Looks at most once a second, for some 20 µs; at once where `now` is set.  A file that cannot
        be read is no reason to end: if the folder is gone, saves will fail.
        """
        if not now and monotonic() - self._seen < _EVERY:
            return
        self._seen = monotonic()
        with suppress(OSError):
            if (word := self._file.read_text()) != self.word:
                raise RunError(
                    f"another start of this run has taken over {self._file.parent} ({word}):"
                    " this one ends"
                )


def take(folder: Path, plan: Plan) -> tuple[Lock | None, Claim | None]:
    """Takes the folder for this start; the lock and the claim, which rank 0 keeps.

    RunError on all ranks.  All ranks call it.
    """

    def take_on_first() -> tuple[Lock | None, Claim | None]:
        return _take(folder, plan) if is_first() else (None, None)

    lock_and_claim = together(take_on_first)
    together(lambda: _check_shared(folder))
    return lock_and_claim


def _take(folder: Path, plan: Plan) -> tuple[Lock, Claim]:
    check_folder(folder)
    try:
        lock = Lock(folder, _job(plan))
        claim = Claim(folder)
    except OSError as error:  # the error of a full disk, for instance, names no file
        raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    lock.wait()  # for an earlier start, which finds that this one has come
    if (store := job_store()) is not None:
        store.set(CLAIM, claim.word)
    return lock, claim


def _check_shared(folder: Path) -> None:
    """RunError unless each node's first rank can write to the folder, and sees the file that rank
    0 has written there.
    """
    if environment("LOCAL_RANK", 0) > 0:
        return
    rank, store, host = environment("RANK", 0), job_store(), gethostname()
    check_folder(folder)
    try:
        probe = folder / f".probe-{rank}"
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        raise RunError(
            f"rank {rank} on {host} cannot write to {folder}: {error.strerror}"
        ) from None
    if store is None:
        return
    claim, word, until = folder / CLAIM, store.get(CLAIM).decode(), monotonic() + _PATIENCE
    while not claim.exists() or claim.read_text() != word:
        if monotonic() > until:
            fault = f"rank {rank} on {host} does not see what rank 0 has written to {folder}"
            raise RunError(f"{fault}: --out has to name one folder that all nodes share")
        sleep(0.2)


def _job(plan: Plan) -> str:
    """The name of a job that may be started more than once; "" where its launcher gives it no name
    of its own.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name == "none" and not loses_nodes(plan):  # torchrun's name for every job without one
        return ""
    return name
