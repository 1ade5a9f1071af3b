"""Methods of torch.distributed, and of what records it, that torch's documentation does not
promise: called here alone.

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


def _waited(kind: str, op: Any = None) -> Any:
    """Options of a collective that is waited for: NCCL does it on the current stream, and gloo
    does not ask.
    """
    options = getattr(distributed_c10d, f"{kind}Options")()
    options.asyncOp = False
    if op is not None:
        options.reduceOp = op
    return options


_SUM, _MAXIMUM = _waited("Allreduce"), _waited("Allreduce", ReduceOp.MAX)
_GATHER, _SCATTER, _EXCHANGE = _waited("Allgather"), _waited("ReduceScatter"), _waited("AllToAll")


def _done(work: Work | None) -> None:
    """NCCL gives no work for what is on the current stream."""
    if work is not None:
        work.wait()


def all_reduce(x: Tensor, group: Group) -> None:
    """Sum in place."""
    _done(group.allreduce([x], _SUM))


def maximum(x: Tensor, group: Group) -> None:
    """Maximum in place."""
    _done(group.allreduce([x], _MAXIMUM))


def begin_all_reduce(x: Tensor, group: Group) -> Work:
    return group.allreduce([x])


def all_gather(whole: Tensor, part: Tensor, group: Group) -> None:
    """[ranks · n, …] of each rank's [n, …]; both contiguous, and so below."""
    _done(group._allgather_base(whole, part, _GATHER))


def begin_all_gather(whole: Tensor, part: Tensor, group: Group) -> Work:
    return group._allgather_base(whole, part)


def reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> None:
    """[n, …], this rank's part of the sum of [ranks · n, …]."""
    _done(group._reduce_scatter_base(part, whole, _SCATTER))


def begin_reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> Work:
    return group._reduce_scatter_base(part, whole)


def all_to_all(came: Tensor, sent: Tensor, group: Group) -> None:
    """Equal parts of the first dim to each rank, and from it."""
    _done(group.alltoall_base(came, sent, [], [], _EXCHANGE))


def begin_all_to_all(
    came: Tensor,
    sent: Tensor,
    group: Group,
    received: Sequence[int] = (),
    parts: Sequence[int] = (),
) -> Work:
    """Parts of the first dim, of sizes by the other rank: those that are `received`, and those
    that are sent.
    """
    return group.alltoall_base(came, sent, [*received], [*parts])


def takes_groups(group: Group, device: torch.device) -> bool:
    """Whether messages can begin as one: NCCL's can, gloo's go on by themselves."""
    return bool(group._get_backend(device).supports_coalescing)


def as_one(begin: Callable[[], object], group: Group, device: torch.device) -> Work:
    """Has the messages that `begin` begins be one, in a communicator of all ranks of the group."""
    group._start_coalescing(device)
    begin()
    return group._end_coalescing(device)


def begin_send(x: Tensor, group: Group, peer: int) -> Work:
    """To a rank of the group."""
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
    """torch 2.13 has one record of all backends, and 2.11 that of NCCL, if it is built with it."""
    dump = getattr(_C10D, f"_dump_fr_{name}", None) or getattr(_C10D, f"_dump_nccl_{name}", None)
    return dump(*options) if dump else None


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


def unrecorded() -> AbstractContextManager[object]:
    """Leaves calls out of a recorder's sight, and of any other torch dispatch mode's: they are
    none of the plan's.
    """
    return cast(Any, _python_dispatch)._disable_current_modes()


def reduction(op: Any) -> str:
    """The name of a reduction that a call of a torch op has: `sum`, `max`, …"""
    return _C10D.ReduceOp.RedOpType(op.op()).name.lower()


def place() -> tuple[int, int]:
    """This process' rank and the number of ranks; 0 of 1 without a job."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def default_store() -> Any:
    """The store by which the ranks of the job have found each other."""
    return cast(Any, distributed_c10d)._get_default_store()


NEWEST = 2, 14
"""The newest version of torch that was tried."""
_NEEDED = (
    *(
        (dist.ProcessGroup, name)
        for name in ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
    ),
    *(
        (dist.ProcessGroup, name)
        for name in ("_start_coalescing", "_end_coalescing", "_get_backend")
    ),
    (_python_dispatch, "_disable_current_modes"),
    *(
        (distributed_c10d, name)
        for name in ("_get_default_store", "_set_pg_timeout", "split_group", "AllToAllOptions")
    ),
)


def untried(version: str) -> str:
    """A line for a version of torch that is newer than those that were tried; "" for others.
    RunError if it cannot be.

    Functions that are called here may change in any.
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
    """Joins the job's process group: on CUDA of NCCL alone, bound to the device, from which other
    groups are split.

    `limit` is that of a call, at which torch ends a rank.
    """
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)


_NAMED = 8  # ranks of a list


def group_of(rows: Sequence[Sequence[int]], name: str, limit: timedelta) -> Group:
    """The group of this rank's row, of rows that have each rank of the job once.  All ranks call it
    in one order.

    One split of the job's communicator makes all rows of it, or a few do (`apart`).  A backend that
    cannot split makes this rank's row alone.  RunError where the group is not that row's, for which
    one call is made in it.
    """
    job, torch_dist = cast(Any, dist.group.WORLD), cast(Any, dist)
    own = [*next(row for row in rows if dist.get_rank() in row)]
    if job.bound_device_id is None:
        group = torch_dist.new_group(
            own, timeout=limit, use_local_synchronization=True, group_desc=name
        )
        _check_members(group, own, name, torch.device("cpu"))
        return group
    found: Group = None
    for some in apart(rows):
        made = torch_dist.split_group(job, some, timeout=limit, group_desc=name)
        _check_members(
            made, next(row for row in some if dist.get_rank() in row), name, job.bound_device_id
        )
        found = made if found is None or own in some else found
    return found


def _check_members(group: Group, row: Sequence[int], name: str, device: torch.device) -> None:
    """RunError unless a new group sums over the ranks of this row alone: one all-reduce of the
    row's hash.

    torch believes that a group has the ranks that it asked for.  Where the backend made one
    communicator of two rows, each sum would be over the ranks of both, without any error.
    """
    # torch's own, without other ranks, by which a host is timed
    if "fake" in dist.get_backend(group):
        return
    mine = _hash_of_row(row)
    total = torch.tensor([mine], dtype=torch.int64, device=device)
    with unrecorded():
        all_reduce(total, group)
    if int(total) != mine * len(row):
        ranks = ", ".join(map(str, row[:_NAMED])) + ", …" * (len(row) > _NAMED)
        raise RunError(
            f"the communicator of {name} for ranks {ranks} has other ranks than these: its"
            " sums would be wrong",
            "report this with the versions of torch and NCCL, and train with another version"
            " of torch",
        )


def _hash_of_row(row: Sequence[int]) -> int:
    """Below 2^40, so that the sum over 2^23 ranks does not overflow."""
    return int.from_bytes(blake2b(",".join(map(str, row)).encode(), digest_size=5).digest(), "big")


def apart(rows: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """The rows of each split, no two of one colour.  Each has all ranks, those without a row to
    make by themselves.

    NCCL makes one communicator of all ranks of a colour (`ncclCommSplit`), which torch makes of a
    row by a hash of 31 bits; on thousands of ranks some rows of two have the same.
    """
    ranks, rest = (
        sorted(rank for row in rows for rank in row),
        [row for row in rows if len(row) > 1],
    )
    while True:
        now: dict[int, Sequence[int]] = {}
        for row in rest:
            now.setdefault(_colour(row), row)
        rest = [row for row in rest if now[_colour(row)] is not row]
        held, alone = {rank for row in now.values() for rank in row}, list[int]()
        for rank in ranks:
            if rank not in held:
                alone.append(rank)
                if now.setdefault(_colour(alone), alone) is alone:
                    alone = []
        assert not alone, "c10d: the last rank cannot be by itself"
        yield [*map(list, now.values())]
        if not rest:
            return


def _colour(row: Sequence[int]) -> int:
    """As `genNcclSplitColor` in torch's ProcessGroupNCCL.cpp."""
    mixed = 0
    for rank in row:
        mixed ^= (rank + 0x9E3779B9 + (mixed << 6) + (mixed >> 2)) % 2**64
    return min(mixed, 2**64 - mixed) % (2**31 - 1)
