"""The copy of a rank's state in host memory, from which a save is written beside training."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from socket import gethostname
from typing import Any, cast

import torch
from torch import Tensor

from ..comm.store import job_store, meet
from ..state.shards import Box

SHARE = 0.9
"""The part of a node's free memory that copies may take."""

_NAME = "room"
_ALIGNED = 64  # bytes
_GROUP = Path("/sys/fs/cgroup")


def room(size: int) -> str:
    """Why a node has no room for its ranks' copies, `size` bytes of this rank; "" if all have.

    Collective.
    """
    free, store, node = free_memory(), job_store(), gethostname()
    if store:
        store.add(f"{_NAME}/of/{node}", size)
        meet(_NAME, "")  # all of the node's ranks have added theirs
        size = store.add(f"{_NAME}/of/{node}", 0)
    fault = (
        f"{node} has {_gib(free)} of memory left, copies take {_gib(size)}"
        if 0 <= SHARE * free < size
        else ""
    )
    return next((word for word in meet(_NAME, fault) if word), "")


def free_memory() -> int:
    """Bytes that the host has for more, or its control group; -1 if neither says it."""
    try:
        found = _figures(Path("/proc/meminfo"))["MemAvailable:"] * 1024
        group = _GROUP / "memory.max"
        limit = group.read_text().strip() if group.is_file() else "max"
        if limit == "max":
            return found
        files = _figures(_GROUP / "memory.stat")["inactive_file"]  # the kernel gives them up
        return min(found, max(0, int(limit) - int((_GROUP / "memory.current").read_text()) + files))
    except (OSError, ValueError, KeyError):
        return -1


def _figures(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def host_memory(own: Mapping[str, Box]) -> tuple[dict[str, Tensor], str]:
    """Host memory for each box's tensor, by name: one stretch, pinned for tensors of a GPU; why
    it is not, or "".
    """
    tensors = {name: box.tensor for name, box in own.items()}
    ends = [*accumulate(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors.values())]
    memory = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8)
    fault = pin(memory) if any(tensor.is_cuda for tensor in tensors.values()) else ""
    return {
        name: memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, (name, tensor) in zip((0, *ends), tensors.items(), strict=False)
    }, fault


def pin(memory: Tensor) -> str:
    """Has CUDA pin memory as it is: torch's own is rounded up to a power of two.

    Why it does not, or "".
    """
    cuda: Any = cast(Any, torch.cuda).cudart()
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error == cuda.cudaError.success:
        return ""
    with suppress(RuntimeError):
        # raises that error, which CUDA would else give to the next kernel
        torch.zeros(1, device="cuda")
    return cuda.cudaGetErrorString(error)


def copied(own: Mapping[str, Box], memory: Mapping[str, Tensor]) -> dict[str, Box]:
    """The boxes with copies of their tensors, which are there when this returns."""
    for name, box in own.items():
        memory[name].copy_(box.tensor.detach(), non_blocking=True)
    if any(box.tensor.is_cuda for box in own.values()):
        torch.cuda.current_stream().synchronize()
    return {name: replace(box, tensor=memory[name]) for name, box in own.items()}
