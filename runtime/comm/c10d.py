"""Methods of torch.distributed and of its recorders that torch's documentation does not promise:
called here alone.

Non-goals: autograd, shapes (`collectives`).  A collective is waited for, or one that begins gives
the work to wait for.
"""

# Each is the group's own method: called once a layer and more, torch's functions take about twice
# the host time.  For the same reason options are made once.

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from hashlib import blake2b
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d
from torch.utils import _python_dispatch

from ..errors import RunError

Group = Any
"""A ProcessGroup; torch's stubs of its methods are partial."""
Work = Any


_C10D: Any = importlib.import_module("torch._C._distributed_c10d")  # torch's stubs do not know it


def _blocking_options(kind: str, op: Any = None) -> Any:
    """Options of a collective that is waited for: NCCL does it on the current stream, and gloo
    does not ask.
    """
    options = getattr(distributed_c10d, f"{kind}Options")()
    options.asyncOp = False
    if op is not None:
        options.reduceOp = op
    return options


_SUM, _MAXIMUM = _blocking_options("Allreduce"), _blocking_options("Allreduce", ReduceOp.MAX)
_GATHER, _SCATTER, _EXCHANGE = (
    _blocking_options("Allgather"),
    _blocking_options("ReduceScatter"),
    _blocking_options("AllToAll"),
)


def _await(work: Work | None) -> None:
    """Waits for a call.  NCCL gives no work for a call on the current stream."""
    if work is not None:
        work.wait()


def all_reduce(x: Tensor, group: Group) -> None:
    """Sum in place."""
    _await(group.allreduce([x], _SUM))


def maximum(x: Tensor, group: Group) -> None:
    """Maximum in place."""
    _await(group.allreduce([x], _MAXIMUM))


def begin_all_reduce(x: Tensor, group: Group) -> Work:
    return group.allreduce([x])


def all_gather(whole: Tensor, part: Tensor, group: Group) -> None:
    """[ranks · n, …] of each rank's [n, …]; both contiguous, and so below."""
    _await(group._allgather_base(whole, part, _GATHER))


def begin_all_gather(whole: Tensor, part: Tensor, group: Group) -> Work:
    return group._allgather_base(whole, part)


def reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> None:
    """[n, …], this rank's part of the sum of [ranks · n, …]."""
    _await(group._reduce_scatter_base(part, whole, _SCATTER))


def begin_reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> Work:
    return group._reduce_scatter_base(part, whole)


def all_to_all(came: Tensor, sent: Tensor, group: Group) -> None:
    """Equal parts of the first dim to each rank, and from it."""
    _await(group.alltoall_base(came, sent, [], [], _EXCHANGE))


def begin_all_to_all(
    came: Tensor,
    sent: Tensor,
    group: Group,
    received: Sequence[int] = (),
    parts: Sequence[int] = (),
) -> Work:
    """Parts of the first dim to and from each rank: `received` are the sizes of the parts that come
    from each rank, `parts` the sizes of the parts sent to each.
    """
    return group.alltoall_base(came, sent, [*received], [*parts])


def takes_groups(group: Group, device: torch.device) -> bool:
    """Whether messages can begin as one: NCCL's can, gloo's go on by themselves."""
    return bool(group._get_backend(device).supports_coalescing)


def as_one(begin: Callable[[], object], group: Group, device: torch.device) -> Work:
    """Joins the messages that `begin` begins into one, in a communicator of all ranks of the
    group.  Returns the work to wait for.
    """
    group._start_coalescing(device)
    begin()
    return group._end_coalescing(device)


def begin_send(x: Tensor, group: Group, peer: int) -> Work:
    """Begins to send x to the rank `peer` of the group."""
    return group.send([x], peer, 0)


def begin_receive(x: Tensor, group: Group, peer: int) -> Work:
    return group.recv([x], peer, 0)


def calls_made(group: Group, device: torch.device) -> int:
    """The calls that a rank has made in a group, on NCCL without messages."""
    return group._get_backend(device)._get_sequence_number_for_group()


def calls_under_way() -> list[dict[str, Any]]:
    """Calls in torch's flight record that have begun and are not done; none where torch keeps
    no record.
    """
    entries: list[dict[str, Any]] = json.loads(_dump("trace_json", True, True) or "{}").get(
        "entries", []
    )
    return [entry for entry in entries if not (entry["retired"] or entry["state"] == "completed")]


def flight_record() -> bytes:
    """torch's record of this rank's last calls, as `torch.distributed.flight_recorder.fr_trace`
    reads it.
    """
    return _dump("trace") or b""


def _dump(name: str, *options: bool) -> Any:
    """torch 2.13 has one record of all backends; 2.11 has NCCL's, if it is built with NCCL."""
    dump = getattr(_C10D, f"_dump_fr_{name}", None) or getattr(_C10D, f"_dump_nccl_{name}", None)
    if not dump:
        return None
    return dump(*options)


def set_limit(group: Group, limit: timedelta) -> None:
    """The limit of calls that begin from now on."""
    cast(Any, distributed_c10d)._set_pg_timeout(limit, group)


def ranks_of(arguments: Mapping[str, Any]) -> list[int]:
    """The global ranks of the group that a call of a torch op has among its arguments, in the
    group's order.
    """
    if "process_group" in arguments:
        group = _C10D.ProcessGroup.unbox(arguments["process_group"])
    else:
        group = _C10D._resolve_process_group(arguments["group_name"])
    return dist.get_process_group_ranks(group)


def hide_from_recorders() -> AbstractContextManager[object]:
    """Hides calls that are not the plan's from a recorder, and from any other torch dispatch
    mode.
    """
    return cast(Any, _python_dispatch)._disable_current_modes()


def reduction(op: Any) -> str:
    """The name of a reduction that a call of a torch op has: `sum`, `max`, …"""
    return _C10D.ReduceOp.RedOpType(op.op()).name.lower()


def place() -> tuple[int, int]:
    """This process' rank and the number of ranks; 0 of 1 without a job."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def default_store() -> Any:
    """The store that the ranks of the job found each other with."""
    return cast(Any, distributed_c10d)._get_default_store()


NEWEST = 2, 14
"""The newest version of torch that was tried."""
_NEEDED = (
    (dist.ProcessGroup, "_allgather_base"),
    (dist.ProcessGroup, "_reduce_scatter_base"),
    (dist.ProcessGroup, "alltoall_base"),
    (dist.ProcessGroup, "_start_coalescing"),
    (dist.ProcessGroup, "_end_coalescing"),
    (dist.ProcessGroup, "_get_backend"),
    (_python_dispatch, "_disable_current_modes"),
    (distributed_c10d, "_get_default_store"),
    (distributed_c10d, "_set_pg_timeout"),
    (distributed_c10d, "split_group"),
    (distributed_c10d, "AllToAllOptions"),
)


def warning_of_new_version(version: str) -> str:
    """A line for a version of torch newer than `NEWEST`, the newest that was tried; "" for others.
    RunError if a function that is called here is missing.

    Any version may change these functions.
    """
    if lacking := [name for holder, name in _NEEDED if not hasattr(holder, name)]:
        tried = ".".join(map(str, NEWEST))
        raise RunError(
            f"torch {version} has no `{lacking[0]}`, which scalec calls: install torch {tried}"
        )
    if tuple(map(int, version.split(".")[:2])) <= NEWEST:
        return ""
    return (
        f"note: torch {version} is newer than those that scalec was tried with, up to"
        f" {NEWEST[0]}.{NEWEST[1]}"
    )


def join(device: torch.device, limit: timedelta) -> None:
    """Joins the job's process group.  On CUDA it has NCCL alone and is bound to the device, so that
    other groups can be split from it.

    `limit` is a call's time limit, at which torch ends a rank.
    """
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)


_RANKS_SHOWN = 8  # ranks of a list


def group_of(rows: Sequence[Sequence[int]], name: str, limit: timedelta) -> Group:
    """The group of this rank's row, of rows that have each rank of the job once.  All ranks call it
    in one order.

    One split of the job's communicator makes the groups of all rows, or a few splits do (`apart`).
    A backend that cannot split makes this rank's row alone.  RunError where the new group has other
    ranks than the row; one call in the group checks it.
    """
    job, torch_dist = cast(Any, dist.group.WORLD), cast(Any, dist)
    own_row = [*_row_of_rank(rows)]
    if job.bound_device_id is None:
        group = torch_dist.new_group(
            own_row, timeout=limit, use_local_synchronization=True, group_desc=name
        )
        _check_members(group, own_row, name, torch.device("cpu"))
        return group
    group: Group = None
    for split_rows in splits_of_rows(rows):
        split_group = torch_dist.split_group(job, split_rows, timeout=limit, group_desc=name)
        _check_members(split_group, _row_of_rank(split_rows), name, job.bound_device_id)
        # A split without this rank's row puts the rank by itself, or with ranks next to it.
        if group is None or own_row in split_rows:
            group = split_group
    return group


def _row_of_rank(rows: Sequence[Sequence[int]]) -> Sequence[int]:
    """The first row that has this rank."""
    return next(row for row in rows if dist.get_rank() in row)


def _check_members(group: Group, row: Sequence[int], name: str, device: torch.device) -> None:
    """RunError unless a new group sums over the ranks of this row alone: one all-reduce of the
    row's hash.

    torch believes that a group has the ranks that it asked for.  Where the backend made one
    communicator of two rows, each sum would be over the ranks of both, without any error.
    """
    # torch's backend without other ranks, used to time a host
    if "fake" in dist.get_backend(group):
        return
    mine = _hash_of_row(row)
    total = torch.tensor([mine], dtype=torch.int64, device=device)
    with hide_from_recorders():
        all_reduce(total, group)
    if int(total) != mine * len(row):
        ranks = ", ".join(map(str, row[:_RANKS_SHOWN])) + ", …" * (len(row) > _RANKS_SHOWN)
        raise RunError(
            f"the communicator of {name} for ranks {ranks} has other ranks than these: its"
            " sums would be wrong",
            "report this with the versions of torch and NCCL, and train with another version"
            " of torch",
        )


def _hash_of_row(row: Sequence[int]) -> int:
    """Below 2^40, so that the sum over 2^23 ranks does not overflow."""
    return int.from_bytes(blake2b(",".join(map(str, row)).encode(), digest_size=5).digest(), "big")


def splits_of_rows(rows: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """The rows of each split, no two of one colour.  Each split has all ranks: a rank without a row
    to make is by itself.

    NCCL makes one communicator of all ranks of a colour (`ncclCommSplit`).  torch makes the colour
    of a row, a hash of 31 bits: on thousands of ranks some rows of two ranks have the same colour.
    """
    ranks = sorted(chain.from_iterable(rows))
    remaining = [row for row in rows if len(row) > 1]
    while True:
        row_by_colour: dict[int, Sequence[int]] = {}
        for row in remaining:
            row_by_colour.setdefault(_colour(row), row)
        remaining = [row for row in remaining if row_by_colour[_colour(row)] is not row]
        covered, alone = {*chain.from_iterable(row_by_colour.values())}, list[int]()
        for rank in ranks:
            if rank not in covered:
                # where its colour is taken, it is with the next rank
                alone.append(rank)
                if row_by_colour.setdefault(_colour(alone), alone) is alone:
                    alone = []
        assert not alone, "c10d: the last rank cannot be by itself"
        yield [*map(list, row_by_colour.values())]
        if not remaining:
            return


def _colour(row: Sequence[int]) -> int:
    """The colour of a row, as `genNcclSplitColor` in torch's ProcessGroupNCCL.cpp makes it."""
    mixed = 0
    for rank in row:
        mixed ^= (rank + 0x9E3779B9 + (mixed << 6) + (mixed >> 2)) % 2**64
    return min(mixed, 2**64 - mixed) % (2**31 - 1)
