"""The copy of a rank's state in host memory; a save writes it beside training."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any, cast

import torch
from torch import Tensor

from ..comm.store import job_store, meet
from ..state.shards import Box

SHARE = 0.9
"""The fraction of a node's free memory that copies may take."""

_NAME = "room"
_ALIGNED = 64  # bytes
_GROUP = Path("/sys/fs/cgroup")


def find_lack_of_room(size: int) -> str:
    """Why some node has no room for its ranks' copies; "" if all nodes have.

    This rank's copy takes `size` bytes.  Collective.
    """
    free, store, node = free_memory(), job_store(), gethostname()
    if store:
        store.add(f"{_NAME}/of/{node}", size)
        meet(_NAME, "")  # all of the node's ranks have added theirs
        size = store.add(f"{_NAME}/of/{node}", 0)
    fault = ""
    if 0 <= SHARE * free < size:
        fault = f"{node} has {_gib(free)} of memory left, copies take {_gib(size)}"
    return next((word for word in meet(_NAME, fault) if word), "")


def free_memory() -> int:
    """Bytes that the host, or its control group, has free; -1 where that is unknown."""
    try:
        available = _figures(Path("/proc/meminfo"))["MemAvailable:"] * 1024
        group = _GROUP / "memory.max"
        limit = group.read_text().strip() if group.is_file() else "max"
        if limit == "max":
            return available
        used = int((_GROUP / "memory.current").read_text())
        files = _figures(_GROUP / "memory.stat")["inactive_file"]  # the kernel gives them up
        return min(available, max(0, int(limit) - used + files))
    except (OSError, ValueError, KeyError):
        return -1


def _figures(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def host_memory(boxes: Mapping[str, Box]) -> tuple[dict[str, Tensor], str]:
    """Host memory for each box's tensor, by name, and why it is not pinned, or "".

    All of it is one stretch of memory, which is pinned for tensors of a GPU.
    """
    starts, size = dict[str, int](), 0
    for name, box in boxes.items():
        starts[name] = size
        size += -(-box.tensor.nbytes // _ALIGNED) * _ALIGNED
    memory = torch.empty(size, dtype=torch.uint8)
    fault = ""
    if any(box.tensor.is_cuda for box in boxes.values()):
        fault = pin(memory)
    copies = dict[str, Tensor]()
    for name, box in boxes.items():
        stretch = memory[starts[name] : starts[name] + box.tensor.nbytes]
        copies[name] = stretch.view(box.tensor.dtype).view(box.tensor.shape)
    return copies, fault


def pin(memory: Tensor) -> str:
    """Has CUDA pin memory; why it does not, or "".

    Torch's own pinned memory is rounded up to a power of two.
    """
    cuda: Any = cast(Any, torch.cuda).cudart()
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error == cuda.cudaError.success:
        return ""
    with suppress(RuntimeError):
        # raises CUDA's pending error, which the next kernel would meet otherwise
        torch.zeros(1, device="cuda")
    return cuda.cudaGetErrorString(error)


def copy_boxes(boxes: Mapping[str, Box], memory: Mapping[str, Tensor]) -> dict[str, Box]:
    """The boxes with copies of their tensors in `memory`; returns when all are copied."""
    for name, box in boxes.items():
        memory[name].copy_(box.tensor.detach(), non_blocking=True)
    if any(box.tensor.is_cuda for box in boxes.values()):
        torch.cuda.current_stream().synchronize()
    return {name: replace(box, tensor=memory[name]) for name, box in boxes.items()}
