"""The last line of a terminal while a run goes on: steps, time left, speed, memory.

Files never get it.
"""

import os
import resource
import shutil
import sys
import time
from typing import TextIO

import torch

OFTEN = 0.2
"""The least number of seconds between two changes."""

BAR = 24
"""Cells of the bar."""

CLEAR = "\r\x1b[2K"


class Progress:
    """Shows nothing where `stream` is no terminal that can clear a line."""

    def __init__(self, stream: TextIO, device: torch.device) -> None:
        can_clear = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._stream = stream if can_clear else None
        self._device, self._shown, self._at = device, False, 0.0

    def show(self, step: int, steps: int, time_left: str, speed: str) -> None:
        """Shows how far a run is after a step, unless the last change was a moment ago."""
        if self._stream is None or time.monotonic() < self._at + OFTEN:
            return
        self._at, cells = time.monotonic(), round(BAR * step / steps)
        line = (
            f"{'━' * cells}{'─' * (BAR - cells)} {step}/{steps}  {time_left} left  {speed} "
            f" {_memory(self._device)}"
        )
        # ends in a carriage return, so that other lines are written over it
        self._stream.write(f"{CLEAR}{line[: shutil.get_terminal_size().columns - 1]}\r")
        self._stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Makes room for another line."""
        if self._stream is not None and self._shown:
            self._stream.write(CLEAR)
            self._shown = False


def _memory(device: torch.device) -> str:
    """The most memory so far: of tensors on a GPU, of the process on a CPU.

    Does not wait for the device.
    """
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # which counts in bytes, and others in KiB
        size *= 1024
    return f"{size / 2**30:.1f} GiB"
