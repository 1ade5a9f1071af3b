"""The folder of a run: its lock, which rank 0 holds, the claim of a start, and that all nodes have
the same folder.

The lock is an flock: the kernel releases it however the process ends, so that none is left to be
judged stale by clocks, as one with a heartbeat is.  Linux has it on NFS (among all clients, since
2.6.12), on GPFS, and on Lustre that is mounted with `flock`; where a file system lacks it, that is
said.

The last start has the claim, and an earlier one that still trains ends: torchrun may start ranks
anew while others, which it has lost sight of, train on; and so may a person.
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
    """Held by this process until it ends."""

    def __init__(self, folder: Path, job: str) -> None:
        """Takes it; `job` is what other starts of it have too, or "".  OSError, RunError where
        another run has it.

        An earlier start of the job, which may be out of sight of its launcher, keeps it until that
        start ends.
        """
        self._folder, self._job = folder, job
        # NFS locks what is open for writing
        made = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        self._file = os.fdopen(made, "r+b", buffering=0)
        self.warning = ""
        self.is_taken = self._try()
        holder = {} if self.is_taken else self._holder()
        if not self.is_taken and not (job and holder.get("job") == job):
            who = (
                f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since"
                f" {holder.get('since', '?')}"
            )
            raise RunError(
                f"another run has the folder {folder}: {who}",
                "end that one, or choose another --out",
            )

    def wait(self) -> None:
        """Waits a little for the earlier start."""
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
        told = {"host": gethostname(), "pid": os.getpid(), "since": since, "job": self._job}
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(json.dumps(told).encode() + b"\n")
        return True

    def _holder(self) -> dict[str, Any]:
        try:
            return json.loads(self._file.read())
        except ValueError:  # it is being written
            return {}


class Claim:
    """One start's claim, which its first rank keeps."""

    def __init__(self, folder: Path) -> None:
        """Takes it from any earlier start.  OSError."""
        self._file, self.word, self._seen = folder / CLAIM, os.urandom(8).hex(), monotonic()
        draft = self._file.with_suffix(f".{self.word}")
        draft.write_text(self.word)
        draft.replace(self._file)

    def check(self, now: bool = False) -> None:
        """RunError where a later start has it.  Looks once a second, some 20 µs, or `now`.

        A file that cannot be read says nothing: where the folder is gone, so say the saves.
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
    """Takes the folder for this start; what rank 0 keeps of it.

    RunError on all.  All ranks call it.
    """
    kept = together(lambda: _taken(folder, plan) if is_first() else (None, None))
    together(lambda: _check_shared(folder))
    return kept


def _taken(folder: Path, plan: Plan) -> tuple[Lock, Claim]:
    check_folder(folder)
    try:
        lock = Lock(folder, _job(plan))
        claim = Claim(folder)
    except OSError as error:  # of a full disk, for instance, which names no file
        raise RunError(f"cannot write to {folder}: {error.strerror}") from None
    lock.wait()  # for an earlier start, which finds that this one has come
    if (store := job_store()) is not None:
        store.set(CLAIM, claim.word)
    return lock, claim


def _check_shared(folder: Path) -> None:
    """RunError unless each node's first rank can write to the folder, and sees there what rank
    0 has written.
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
            told = f"rank {rank} on {host} does not see what rank 0 has written to {folder}"
            raise RunError(f"{told}: --out has to name one folder that all nodes share")
        sleep(0.2)


def _job(plan: Plan) -> str:
    """The name of a job that may be started more than once; "" where its launcher gives none of
    its own.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" and not loses_nodes(plan) else name
