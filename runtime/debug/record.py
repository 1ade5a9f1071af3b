"""Every collective of a run on this rank: recorded for `scalec verify --recorded`, or printed on
the terminal.

The dispatch mode sees every `c10d` op that torch's dispatcher is asked to do, whoever calls it.
autograd hands its modes to the threads that run backward, so that the mode sees calls in backward
on CUDA too.

With SCALEC_RECORD=1 or SCALEC_LOG=trace each torch op costs about 6 µs more of host time and each
collective about 0.1 ms; a collective takes about 150 bytes of the record.  Without either this
module is not imported.
"""

import json
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..comm import c10d
from ..config.plan import Plan

_P = ParamSpec("_P")
_T = TypeVar("_T")
_OPS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
_PEERS = {"send": "dst", "receive": "src"}  # as torch's schemas call them
_GROUP = {"process_group", "group_name"}
# the tensors that go in, as torch's schemas call them
_SENT = ("input_tensor", "input", "tensors", "tensor", "input_tensors")


class Named(Protocol):
    """A call as the plan has it; its text names its value, layer, microbatch and plan line."""

    @property
    def op(self) -> str: ...


class _Observer(TorchDispatchMode, ABC):
    """While entered, observes each collective.  `first` steps were done before this run."""

    def __init__(self, first: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._rank, self._world = c10d.place()
        self._step, self._phase, self._order = first, "loop", 0

    def of(
        self, phase: Literal["train", "evaluate"], function: Callable[_P, _T]
    ) -> Callable[_P, _T]:
        """`function`, with its calls marked as calls of `phase`; a call in `train` is the next
        step.
        """

        def run(*args: _P.args, **options: _P.kwargs) -> _T:
            self._step += phase == "train"
            self._phase, began = phase, self._order
            self._begin()
            result = function(*args, **options)
            self._end(self._order - began)
            self._phase = "loop"
            return result

        return run

    def _begin(self) -> None:
        """Is called when a step or an evaluation begins."""

    def _end(self, calls: int) -> None:
        """Is called when a step or an evaluation has ended, with the number of its calls."""

    @abstractmethod
    def _observe(self, line: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Does a collective, which the line describes, by `call`; returns its result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        if "c10d" not in func.namespace:
            return call()
        names = (argument.name for argument in func._schema.arguments)
        # torch passes no arguments that have their defaults
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        if _GROUP.isdisjoint(arguments):  # it only waits, or wraps a result
            return call()
        name = func.name().partition(".")[0]
        shape, dtype = _describe_sent(arguments)
        op, group = _OPS.get(name, name), c10d.ranks_of(arguments)
        reduction = arguments.get("reduce_op", "")
        if not isinstance(reduction, str):
            reduction = c10d.reduction(reduction)
        line: dict[str, Any] = {
            "step": self._step,
            "phase": self._phase,
            "order": self._order,
            "op": op,
            "reduction": reduction,
            "group": group,
            "shape": shape,
            "dtype": dtype,
        }
        if op in _PEERS:
            line["peer"] = group[arguments[_PEERS[op]]]
        self._order += 1
        return self._observe(line | _splits(name, arguments), call)


class Recorder(_Observer):
    """While entered, writes a JSON line to `folder`/rank<N>.jsonl for each collective, before it is
    done.

    The first line says whose record it is.  A collective's line has: `step`; `phase`, which is
    `train` or `evaluate` within functions that `of` wraps, and `loop` outside of them; `order`,
    counted over the run; `op`, `reduction`, `group` as global ranks; `shape` and `dtype` of the
    local tensor that goes in, or is received; for a message its `peer` too, a global rank; for an
    all-to-all with parts of given sizes the sizes as `splits`, [to each rank, from each].  An op
    that no plan has appears under torch's own name.  A line with `calls` closes each step and
    evaluation.  Rank 0 puts the program's plan.json beside, so that the folder holds all that a
    comparison needs.
    """

    def __init__(self, folder: Path, plan: Plan, first: int) -> None:
        super().__init__(first)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self._rank:05}.jsonl"
        self._file = path.open("w", buffering=1, encoding="utf-8")  # by lines: a crash loses none
        origin = {
            "plan": plan.name,
            "mesh": dict(plan.mesh),
            "world": self._world,
            "rank": self._rank,
            # ranks that torchrun started together share it
            "run": os.environ.get("TORCHELASTIC_RUN_ID", ""),
            "torch": torch.__version__,
            "backend": dist.get_backend() if dist.is_initialized() else "",
        }
        self._write(origin)
        account = Path(sys.argv[0]).with_name("plan.json")
        if self._rank == 0 and account.exists():
            shutil.copyfile(account, folder / "plan.json")

    def _end(self, calls: int) -> None:
        self._write({"step": self._step, "phase": self._phase, "calls": calls})

    def _observe(self, line: dict[str, Any], call: Callable[[], Any]) -> Any:
        self._write(line)
        return call()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


class CallLog(_Observer):
    """While entered, prints a line for each collective on standard error, when its call has
    returned.

    `calls` gives the plan's calls of a step of this rank, or of an evaluation, in order; a call
    that the plan does not have is named by its op and its group.  The time is the time of the host
    in the call; on a GPU that is the time of the launch.
    """

    def __init__(self, first: int, calls: Callable[[bool], Iterator[Named]]) -> None:
        super().__init__(first)
        self._calls, self._planned = calls, iter(())

    def _begin(self) -> None:
        self._planned = self._calls(self._phase == "evaluate")

    def _observe(self, line: dict[str, Any], call: Callable[[], Any]) -> Any:
        began = perf_counter()
        result = call()
        seconds = perf_counter() - began
        what = self._describe(line)
        size = 0
        if line["dtype"]:
            size = prod(line["shape"]) * getattr(torch, line["dtype"]).itemsize
        when = f"step {self._step}" if self._phase == "train" else self._phase
        print(
            f"rank {self._rank}, {when}: {what}, {size:,} bytes, {seconds * 1e3:.3f} ms",
            file=sys.stderr,
            flush=True,
        )
        return result

    def _describe(self, line: Mapping[str, Any]) -> str:
        """The plan's next call, if it is the one that the line describes; else its op and group."""
        planned = None
        if self._phase != "loop":
            planned = next(self._planned, None)
        op = line["op"]
        # the plan's rotation is a send of torch
        if planned is not None and planned.op in (op, {"send": "rotate"}.get(op)):
            return str(planned)
        return f"{op} among ranks {line['group']}, which the plan does not have here"


def _describe_sent(arguments: Mapping[str, Any]) -> tuple[list[int], str]:
    """Shape and dtype of the first tensor that goes in; on a rank that sends nothing, the dtype is
    "".
    """
    value = next((arguments[name] for name in _SENT if name in arguments), None)
    while isinstance(value, list):
        values = cast("list[Any]", value)
        value = values[0] if values else None
    if not isinstance(value, Tensor):
        return [], ""
    return list(value.shape), str(value.dtype).removeprefix("torch.")


def _splits(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of an all-to-all's parts along dim 0, to each rank and from each; empty where the
    call has none.
    """
    if name != "c10d::alltoall_base_":
        return {}
    to_ranks: list[int] = list(arguments["input_split_sizes"])
    from_ranks: list[int] = list(arguments["output_split_sizes"])
    if not to_ranks and not from_ranks:
        return {}
    return {"splits": [to_ranks, from_ranks]}
