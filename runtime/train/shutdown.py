"""Ends a rank: quietly, or at once with the one message that explains the failure."""

import json
import os
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ..comm.store import fails_first, meet, part
from ..errors import RunError, reason
from .launch import warn

_GRACE = 1.0  # seconds in which the launcher sees that the first rank to fail has ended


@contextmanager
def ending() -> Generator[None]:
    """Ends the process at once on any failure: a rank that lingers, or waits for its group, holds up all others."""
    try:
        yield
        meet("end", "")  # no rank tears down what another one still reads
        part()
    except (RunError, OSError) as error:
        _leave(f"error: {reason(error)}", 1, reason(error))
    except KeyboardInterrupt:
        _leave("interrupted", 130, "interrupted")
    except BaseException as error:  # torch's CheckpointException is no Exception
        rank = f"rank {os.environ.get('RANK', 0)}"
        _leave(
            f"{rank} failed\n{traceback.format_exc()}",
            1,
            f"{rank}: {type(error).__name__}: {' '.join(str(error).split())}",
        )
    if dist.is_initialized():
        dist.destroy_process_group()


def refuse(error: RunError | OSError) -> NoReturn:
    """Ends a run that cannot start.  All ranks call it alike, or none has joined a group; the first says why."""
    tell_launcher(reason(error))
    warn(f"error: {reason(error)}")
    if dist.is_initialized():
        with suppress(RuntimeError):  # the store is gone
            part()
        dist.destroy_process_group()
    sys.exit(2)


def tell_launcher(reason: str) -> None:
    """Writes why this rank fails where torchrun looks for it, if torchrun started it: its report then says so."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")


def _leave(message: str, status: int, reason: str) -> NoReturn:
    if _fails_first():
        tell_launcher(reason)
        print(message, file=sys.stderr)
    else:
        time.sleep(_GRACE)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(status)


def _fails_first() -> bool:
    """Whether no other rank has failed before: those that fail later have only lost their peers."""
    try:
        return fails_first()
    except RuntimeError:  # the store is gone with the rank that kept it
        return False
