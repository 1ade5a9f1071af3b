"""Checkpoints: the state of a step in a folder of its own, whole or not there at all.

Written by torch.distributed.checkpoint from global shapes, so that any mesh can load what any other saved.

Non-goals: no asynchronous saving; nothing but the state (the order of data follows from seed and step).
"""

import re
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .state import State

KEEP = 2


def save(folder: Path, step: int, state: State) -> Path:
    """Writes `folder`/step-NNNNNN, then removes all but the newest two.  Collective; `step` counts finished steps."""
    whole = folder / f"step-{step:06d}"
    part = whole.with_suffix(".tmp")
    if _is_first():
        shutil.rmtree(part, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    barrier()
    with _dcp() as dcp:
        dcp.save(state.state_dict(), checkpoint_id=part)
    barrier()
    if _is_first():
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)
        for old in _all(folder)[:-KEEP]:
            shutil.rmtree(old)
    return whole


def load(path: Path, state: State) -> None:
    """Fills the state from a checkpoint written on any mesh.  Collective."""
    values = state.state_dict()
    with _dcp() as dcp:
        dcp.load(values, checkpoint_id=path)
    state.load_state_dict(values)


def parameters(path: Path) -> dict[str, Tensor]:
    """The parameters that a checkpoint holds, whole, without their values: tensors on the device `meta`."""
    with _dcp() as dcp:
        recorded: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in recorded.items()
        if not name.startswith("optimizer/")
    }


def read(path: Path, values: dict[str, Tensor]) -> None:
    """Fills tensors of a checkpoint, whole ones, by name.  For one process."""
    with _dcp() as dcp:
        dcp.load(values, checkpoint_id=path)


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint in a folder."""
    return next(reversed(_all(folder)), None)


def barrier() -> None:
    """Waits for all ranks, where there are several."""
    if dist.is_initialized():
        cast(Any, dist).barrier()


@contextmanager
def _dcp() -> Generator[Any]:
    """torch.distributed.checkpoint, without its warning that a single process is a single process."""
    import torch.distributed.checkpoint as dcp  # slow to import, needed only to save and load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield dcp


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _all(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted((path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=finished_steps)


def finished_steps(path: Path) -> int:
    """How many steps a checkpoint has behind it."""
    return int(path.name.removeprefix("step-"))
