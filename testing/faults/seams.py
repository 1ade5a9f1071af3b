"""Seams of a run at which faults strike: functions of the runtime and of torch that a rank's
process replaces.

The product has no hooks for it.  A process whose faults name no event of a seam keeps that seam as
it is.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from ... import runtime
from ...runtime.checkpoint.background import Saver
from ...runtime.checkpoint.files import Disk
from ...runtime.data.loader import Batch, Loader
from ...runtime.data.prefetch import Ahead
from ...runtime.state.engine import TrainState
from .fault import Event, Fault, Memory, Scene

MARK = "struck-"
Reached = tuple[Event, int | None]
"""An event, and its step where that is not the current one."""


class Points:
    """The points that this rank comes to, and the faults that strike there.

    `folder` is the job's: it holds the processes' ids, and a mark of each strike, by which none
    happens too often.
    """

    def __init__(self, faults: Sequence[Fault], folder: Path, rank: int) -> None:
        self._faults, self._folder, self._rank = faults, folder, rank
        self._step = 0
        self._reached = Counter[Fault]()

    def come_to(
        self, event: Event, step: int | None = None, memory: Mapping[Memory, Tensor] | None = None
    ) -> None:
        """Has the faults strike that are due.  `step` is the current one where it is None."""
        step = self._step if step is None else step
        for fault in self._faults:
            if fault.at.fits(event, step, self._rank):
                self._reached[fault] += 1
                if self._reached[fault] > fault.at.nth and self._is_due(fault, step):
                    fault.do.strike(Scene(self._rank, processes(self._folder), memory or {}))

    def _is_due(self, fault: Fault, step: int) -> bool:
        """Whether it has happened less often than it is to; this time is marked."""
        name = blake2b(repr(fault).encode(), digest_size=8).hexdigest()
        for time in range(fault.times):
            try:
                with (self._folder / f"{MARK}{name}-{time}").open("x") as mark:
                    mark.write(f"rank {self._rank} in step {step}: {fault}\n")
                return True
            except FileExistsError:
                continue
        return False

    def install(self) -> None:
        """Replaces the seams that faults name, in this process.

        Before the program's file is read.
        """
        named = {fault.at.event for fault in self._faults}
        if named & {"step", "collective"}:
            self._watch_steps()
        for events, owner, name, event in SEAMS:
            if named & events:
                setattr(owner, name, self._before(event, getattr(owner, name)))

    def _watch_steps(self) -> None:
        def begun(ahead: Ahead[Batch], step: int) -> Batch:
            self._step = step + 1
            return batch_of(ahead, step)

        def train(plan: Any, build: Any, train_step: Any, eval_step: Any) -> None:
            @wraps(train_step)
            def step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Any:
                self.come_to("step", memory=_memory(model, state))
                return train_step(model, state, batch, lr)

            start(plan, build, step, eval_step)

        reader, start = cast(Any, Ahead), runtime.train
        batch_of, reader.get_batch = reader.get_batch, begun
        cast(Any, runtime).train = train

    def _before(
        self, event: Callable[[Sequence[Any]], Reached], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function, before each call of which this rank comes to the event of its arguments."""

        def called(*arguments: Any, **options: Any) -> Any:
            self.come_to(*event(arguments))
            return function(*arguments, **options)

        return called


def _prepared(arguments: Sequence[Any]) -> Reached:
    arguments[0].wait()  # for the save before
    return "prepare", arguments[1]


def _renamed(arguments: Sequence[Any]) -> Reached:
    old, new = map(Path, arguments[1:3])
    return ("remove" if new.suffix == ".tmp" else "publish"), _step_of(old)


_COLLECTIVES = (
    "allreduce broadcast send recv alltoall_base _allgather_base _reduce_scatter_base".split()
)
_DISK: set[Event] = {"write", "sync", "publish", "remove"}
SEAMS: list[tuple[set[Event], Any, str, Callable[[Sequence[Any]], Reached]]] = [
    ({"data"}, Loader, "make_host_batch", lambda given: ("data", given[1] + 1)),
    *(
        ({"collective"}, dist.ProcessGroup, name, lambda _: ("collective", None))
        for name in _COLLECTIVES
    ),
    ({"prepare"}, Saver, "begin", _prepared),
    (_DISK, Disk, "write", lambda given: ("write", _step_of(given[1].name))),
    (
        _DISK,
        Disk,
        "sync",
        lambda given: ("sync", _step_of(os.readlink(f"/proc/self/fd/{given[1]}"))),
    ),
    (_DISK, Disk, "rename", _renamed),
    (_DISK, Disk, "remove", lambda given: ("remove", _step_of(given[1]))),
]
"""Events, each with the method that is replaced where a fault names one, and how its arguments
say which it is.
"""


def _memory(model: nn.Module, state: TrainState) -> dict[Memory, Tensor]:
    """The last element of each, which neither pads nor belongs to a token that a batch may lack.

    Weights that are gathered from the state have no memory of their own, or are about to be written
    over.
    """
    *_, own = (
        box.tensor
        for box in state.boxes()
        if box.tensor.numel() and not box.key.startswith("optimizer/")
    )
    *_, last = (weight.data for weight in model.parameters())
    weights = last if last.dtype != own.dtype and last.untyped_storage().nbytes() else own
    return {"weights": weights.view(-1)[-1:], "state": own.view(-1)[-1:]}


def processes(folder: Path) -> dict[int, int]:
    """The ids of a job's processes that have begun, by rank."""
    return {int(file.stem): int(file.read_text()) for file in folder.glob("*.pid")}


def _step_of(path: str | Path) -> int | None:
    """The step of the checkpoint that a path lies in, if it does."""
    found: Iterable[str] = re.findall(r"step-(\d+)", str(path))
    return next((int(step) for step in found), None)
