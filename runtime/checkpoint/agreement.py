"""Collective steps that succeed on all ranks or fail on all, with the error of the first rank that failed."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import RunError, reason

_LONGEST = 4000  # bytes of a failure
_T = TypeVar("_T")


def together(device: torch.device, do: Callable[[], _T]) -> _T:
    """`do()`, then waits for all ranks.  RunError on all if one has met such, or an OSError.  Collective."""
    done, failure = list[_T](), ""
    try:
        done.append(do())
    except (RunError, OSError) as error:
        failure = reason(error)
    if failure := _first(failure, device):
        raise RunError(*map(str.strip, failure.splitlines()))
    return done[0]


def _first(failure: str, device: torch.device) -> str:
    """The failure of the first rank that has one; empty if none has."""
    if not dist.is_initialized():
        return failure
    rank, world = dist.get_rank(), dist.get_world_size()
    first = torch.tensor(rank if failure else world, device=device)
    cast(Any, dist).all_reduce(first, dist.ReduceOp.MIN)
    source = int(first)
    if source == world:
        return ""
    return _of_rank(source, failure, device)


def _of_rank(source: int, line: str, device: torch.device) -> str:
    """One rank's line, on all ranks."""
    text = line.encode()[:_LONGEST] if source == dist.get_rank() else b""
    sent = torch.tensor(list(text.ljust(_LONGEST, b"\0")), dtype=torch.uint8, device=device)
    cast(Any, dist).broadcast(sent, src=source)
    return sent.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def agreed(device: torch.device, line: str) -> None:
    """RunError on all ranks unless each has the same short line.  Collective."""
    if not dist.is_initialized():
        return
    given = _of_rank(0, line, device)

    def compare() -> None:
        if given != line:
            raise RunError(f"rank {dist.get_rank()} has {line}, and rank 0 {given}: do all nodes see the same files?")

    together(device, compare)


def anywhere(marks: list[bool], device: torch.device) -> list[bool]:
    """Which marks are set on some rank.  Collective: as many on each."""
    if not dist.is_initialized():
        return marks
    counts = torch.tensor(marks, dtype=torch.int32, device=device)
    cast(Any, dist).all_reduce(counts, dist.ReduceOp.MAX)
    return [bool(mark) for mark in cast(Any, counts).tolist()]
