"""Measures the seconds that the host takes to issue an op and an action of a pipeline, by steps of
emitted programs on one rank.

The peers in the rank's groups are absent: calls in these groups do nothing.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from runpy import run_path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...runtime.comm.mesh import Axis, Mesh
from ...runtime.data.loader import Batch
from .calls import Row
from .clock import REPEATS, Clock

WARM = 3
"""The number of first steps that are not measured: they make objects that later ones use."""


def figures(
    steps: Sequence[Mapping[str, Any]], clock: Clock, seconds_of_op: Callable[[], float]
) -> Row:
    """The seconds of an op and, if some steps have actions, of an action.

    An op takes the time that more layers add to a step, divided by the number of ops that they add;
    where that cannot be told, `seconds_of_op` measures an op by itself.  An action takes the time
    of a pipeline's step besides its ops, divided by the number of actions.

    Call it before ranks have a process group.
    """
    plain = [step for step in steps if not step["actions"]]
    staged = [step for step in steps if step["actions"]]
    seconds = 0.0
    more_ops = plain[-1]["ops"] - plain[0]["ops"] if plain else 0
    if more_ops:
        seconds = (_seconds(plain[-1], clock) - _seconds(plain[0], clock)) / more_ops
    row = {"op": seconds if seconds > 0 else seconds_of_op()}
    for step in staged:
        seconds_of_actions = _seconds(step, clock) - row["op"] * step["ops"]
        row["action"] = max(0.0, seconds_of_actions / step["actions"])
    return row


def _seconds(step: Mapping[str, Any], clock: Clock) -> float:
    """The median of seconds until the host has issued a step, on a device that was idle before."""
    with TemporaryDirectory() as name, _absent_peers(prod(step["mesh"].values())):
        for file, text in step["files"].items():
            Path(name, file).write_text(text, encoding="utf-8")
        program, mesh = run_path(str(Path(name, "train.py"))), QuietMesh(step["mesh"], clock.device)
        model, state = program["build"](mesh)
        state.initialise(0)
        inputs = list[torch.Tensor]()
        for shape in step["inputs"]:
            inputs.append(torch.zeros(shape, dtype=torch.int64, device=clock.device))
        batch = Batch(*inputs)
        seconds = list[float]()
        for _ in range(REPEATS + WARM):
            clock.wait()
            start = perf_counter()
            program["train_step"](model, state, batch, 0.0)
            seconds.append(perf_counter() - start)
        clock.wait()
        return median(seconds[WARM:])


@contextmanager
def _absent_peers(ranks: int) -> Generator[None]:
    """A group of `ranks` ranks that does nothing."""
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    yield
    if ranks > 1:
        dist.destroy_process_group()


class QuietMesh(Mesh):
    """A mesh whose collectives are done before they begin."""

    def axis(self, *names: str) -> Axis:
        axis = super().axis(*names)
        if not axis.group:
            return axis
        return replace(axis, group=_Quiet(axis.group))


class _Quiet:
    """Stands in for a process group, and has the group's properties."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, *_: Any) -> Self:
        return self

    _allgather_base = _reduce_scatter_base = alltoall_base = allreduce

    def wait(self) -> None: ...
