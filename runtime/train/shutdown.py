"""Ends a rank: quietly, or at once, with the one message that explains the failure."""

import json
import os
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import NoReturn, Protocol

import torch.distributed as dist

from ..comm.store import leave_store, meet
from ..errors import RunError, reason
from .launch import stop_launcher, warn
from .stop import INTERRUPTED, Stopped

_GRACE = 1.0  # seconds in which the launcher sees that the first rank to fail has ended
_READ = 3.0  # seconds in which others read why, where the store ends with this process


class Watching(Protocol):
    """Tells other ranks that this one fails (`watchdog`)."""

    def report_failure(self, reason: str) -> str: ...
    def stop(self) -> None: ...
    def report_lost(self, error: BaseException) -> NoReturn: ...


@contextmanager
def ending(watchdog: Watching | None = None) -> Generator[None]:
    """Ends the process at once on any failure: a rank that lingers, or waits for its group,
    holds up all others.
    """
    status = 0
    try:
        try:
            yield
        except Stopped as stopped:
            status = stopped.status
        meet("end", "")  # no rank tears down what another one still reads
        if watchdog is not None:
            watchdog.stop()
        leave_store()
    except (RunError, OSError) as error:
        _leave(watchdog, f"error: {reason(error)}", 1, reason(error))
    except KeyboardInterrupt:
        _leave(watchdog, "interrupted", INTERRUPTED, "interrupted")
    except BaseException as error:  # torch's CheckpointException is no Exception
        rank = f"rank {os.environ.get('RANK', 0)} on {gethostname()}"
        words = " ".join(str(error).split())
        if watchdog is not None and _has_lost_another(error):
            watchdog.report_lost(error)
        _leave(
            watchdog,
            f"{rank} failed\n{traceback.format_exc()}{_program_line(error)}",
            1,
            f"{rank}: {type(error).__name__}: {words}",
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    if status:
        stop_launcher()
        sys.exit(status)


def _program_line(error: BaseException) -> str:
    """The innermost line of the program in an error's traceback that comes from a line of the plan,
    with the plan's line; "" if there is none.
    """
    import linecache

    from ..debug.source_lines import place, plan_line  # most runs do without

    program = Path(sys.argv[0]).name
    innermost: tuple[str, int] | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if Path(file).name == program and plan_line(file, number):
            innermost = file, number
    if innermost is None:
        return ""
    code = linecache.getline(*innermost).partition("  #")[0].strip()
    return f"in the plan at {place(*innermost)}\n    {code}\n"


def _has_lost_another(error: BaseException) -> bool:
    """Whether a call to other ranks has failed, as it does when one of them has ended."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(word in str(error) for word in ("[c10d]", "gloo", "NCCL"))


def refuse(error: RunError | OSError, watchdog: Watching | None = None) -> NoReturn:
    """Ends a run that cannot start.

    Either all ranks call it alike, or none has joined a group.  The first rank says why.
    """
    tell_launcher(reason(error))
    warn(f"error: {reason(error)}")
    if dist.is_initialized():
        with suppress(RuntimeError):  # the store is gone
            if watchdog is not None:
                watchdog.stop()
            leave_store()
        dist.destroy_process_group()
    sys.exit(2)


def end_interrupted() -> NoReturn:
    """Ends a rank that Ctrl-C has interrupted before its run began: quietly and at once, as all
    others end too.
    """
    os._exit(INTERRUPTED)


def tell_launcher(reason: str) -> None:
    """Writes why this rank fails to the file that torchrun reads for its report, if torchrun has
    started this rank.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": content}), encoding="utf-8")


def _leave(watchdog: Watching | None, message: str, status: int, reason: str) -> NoReturn:
    # another rank's words, where it has failed before: that rank prints its message
    before = watchdog.report_failure(reason) if watchdog is not None else ""
    tell_launcher(before or reason)
    if before:
        time.sleep(_GRACE)
    else:
        print(message, file=sys.stderr)
        if watchdog is not None and keeps_store():
            time.sleep(_READ)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(status)


def keeps_store() -> bool:
    """Whether the job's store ends with this process: where torchrun has not made one, rank 0
    keeps it.
    """
    return (
        os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )
