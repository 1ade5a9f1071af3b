"""Calls of collectives that a rank makes in a step: the plan's, and torch's of a program of torch
alone.

Purpose: each collective of a plan is found in what torch did; the rest is what torch communicates
beyond the plan.  Non-goals: time (`torch_target`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from scalec.compiler.analysis.communication import collectives
from scalec.compiler.ir import Program

KINDS = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
"""The operators of torch that communicate, by the plan's words for them."""


class Call(NamedTuple):
    """A collective: its kind, the mesh axes of its group, the bytes that a rank gives to it."""

    op: str
    axes: tuple[str, ...]
    bytes: int


Traffic = Counter[Call]
"""How often each is called."""


class Sent(TorchDispatchMode):
    """Counts the calls of collectives; `mesh` has the degree of each axis, outermost first."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__()
        self.mesh, self.calls = mesh, Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts what local tensors are given to; a DTensor's operator comes down to those."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if kind := KINDS.get(name) if "c10d" in func.namespace else None:
            given = args[1] if "base" in name else args[0]
            tensors = [given] if isinstance(given, Tensor) else given
            self.calls[Call(kind, self._axes(args), sum(each.nbytes for each in tensors))] += 1
        return func(*args, **(kwargs or {}))

    def _axes(self, args: Any) -> tuple[str, ...]:
        """The axes along which the ranks of a call's group differ."""
        ranks = dist.get_process_group_ranks(
            next(group for each in args if (group := _group(each)))
        )
        places = [_place(rank, [*self.mesh.values()]) for rank in ranks]
        return tuple(
            axis
            for axis, of in zip(self.mesh, zip(*places, strict=True), strict=True)
            if len({*of}) > 1
        )


def _group(argument: Any) -> Any:
    """The group of ranks that an argument is, or names."""
    if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min"):
        return _resolve_process_group(argument)  # type: ignore[arg-type]
    try:
        return _resolve_process_group(dist.ProcessGroup.unbox(argument).group_name)  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return None


def _place(rank: int, sizes: list[int]) -> list[int]:
    """The place of a rank on each axis."""
    found: list[int] = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        found.insert(0, at)
    return found


def sent_by(step: Callable[[], object], mesh: Mapping[str, int]) -> Traffic:
    """The calls of a step after the first, whose groups are there."""
    step()
    with Sent(mesh) as mode:
        step()
    return mode.calls


def planned(program: Program, rank: int = 0, use: str = "") -> Traffic:
    """The calls of a plan's step on one rank of its pipeline, all of them or those of one use."""
    calls = Traffic()
    for each in collectives(program, rank):
        if each.ranks > 1 and use in ("", each.use):
            axes = tuple(axis for axis in each.axes if program.degree((axis,)) > 1)
            calls[Call(each.op, axes, each.bytes)] += each.count
    return calls


class Row(NamedTuple):
    """The calls of a kind over the same axes: how often, and bytes, as the plan has it and as
    torch does it.
    """

    op: str
    axes: tuple[str, ...]
    calls_planned: int
    calls: int
    bytes_planned: int
    bytes: int

    @property
    def beyond(self) -> int:
        """The bytes beyond the plan's."""
        return max(0, self.bytes - self.bytes_planned)


INSTEAD = {"all_to_all": ("all_gather",), "rotate": ("send", "receive")}
"""Calls of torch that do the work of others: DTensor gathers on CPUs, where gloo has no
exchange.
"""


def compared(plan: Traffic, sent: Traffic) -> list[Row]:
    """Both by kind and axes; a call over several axes, which torch does one after the other,
    counts for the first.
    """
    wanted, done = _sums(as_torch(plan, sent)), _sums(sent)
    keys = sorted({*wanted, *done})
    return [Row(*key, wanted[key][0], done[key][0], wanted[key][1], done[key][1]) for key in keys]


def as_torch(plan: Traffic, sent: Traffic) -> Traffic:
    """The calls of a plan under torch's words, and over the axes that torch has groups of."""
    ops, groups, found = (
        {call.op for call in sent},
        {(call.op, call.axes) for call in sent},
        Traffic(),
    )
    for call, count in plan.items():
        for op in (call.op,) if call.op in ops else INSTEAD.get(call.op, (call.op,)):
            axes = call.axes if (op, call.axes) in groups else call.axes[:1]
            found[Call(op, axes, call.bytes)] += count
    return found


def _sums(calls: Traffic) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """Calls and bytes by kind and axes; none of those that are not there."""
    found = defaultdict[tuple[str, tuple[str, ...]], tuple[int, int]](lambda: (0, 0))
    for (op, axes, size), count in calls.items():
        before = found[op, axes]
        found[op, axes] = before[0] + count, before[1] + count * size
    return found
