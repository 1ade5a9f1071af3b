"""SCALEC_LOG=trace: a line for each collective of a run on this rank, with its place in the plan, bytes and time.

Without it this module is not imported.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from time import perf_counter
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .record import Recorder

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Named(Protocol):
    """A call as the plan has it, whose text names its value, layer, microbatch and plan line."""

    @property
    def op(self) -> str: ...


class CallLog(Recorder):
    """While entered, prints a line for each collective on standard error, when its call has returned.

    `calls` has those of a step of this rank, or of an evaluation, in the plan's order; a call that is none of them is
    told by its op and its group.  The time is the host's in the call: of a GPU it is that of its launch.
    """

    def __init__(self, first: int, calls: Callable[[bool], Iterator[Named]]) -> None:
        TorchDispatchMode.__init__(self)  # pyright: ignore[reportUnknownMemberType]
        self._step, self._phase, self._order = first, "loop", 0
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._calls, self._planned = calls, iter(())
        self._line: Mapping[str, Any] = {}

    def of(self, phase: Literal["train", "evaluate"], function: Callable[_P, _T]) -> Callable[_P, _T]:
        """`function`, at the beginning of which the plan's calls begin anew."""

        def begun(*args: _P.args, **options: _P.kwargs) -> _T:
            self._planned = self._calls(phase == "evaluate")
            return function(*args, **options)

        return super().of(phase, begun)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        order, began = self._order, perf_counter()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._order > order:
            self._tell(perf_counter() - began)
        return result

    def _write(self, line: Mapping[str, Any]) -> None:
        self._line = line

    def _tell(self, seconds: float) -> None:
        line = self._line
        call = next(self._planned, None) if self._phase != "loop" else None
        known = call is not None and call.op in (line["op"], {"send": "rotate"}.get(line["op"]))
        what = str(call) if known else f"{line['op']} among ranks {line['group']}, which the plan does not have here"
        size = prod(line["shape"]) * getattr(torch, line["dtype"]).itemsize if line["dtype"] else 0
        when = f"step {self._step}" if self._phase == "train" else self._phase
        print(f"rank {self._rank}, {when}: {what}, {size:,} bytes, {seconds * 1e3:.3f} ms", file=sys.stderr, flush=True)
