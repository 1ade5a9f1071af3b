"""Seconds in which the host issues an op and an action of a pipeline, by steps of emitted programs
on one rank.

Its groups are of peers that are absent: their calls do nothing.
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

from ..comm.mesh import Axis, Mesh
from ..data.loader import Batch
from .calls import Row
from .clock import REPEATS, Clock

WARM = 3
"""The first steps, which make what later ones use."""


def figures(steps: Sequence[Mapping[str, Any]], clock: Clock, op: Callable[[], float]) -> Row:
    """The seconds of an op, and where a step has actions, of an action; `op` measures that of an op
    by itself.

    An op's are those by which a step with more layers is longer, for each op more; an action's are
    what a pipeline's step takes besides its ops.  To be called before ranks have a process group.
    """
    plain, staged = (
        [it for it in steps if bool(it["actions"]) == wanted] for wanted in (False, True)
    )
    more = plain[-1]["ops"] - plain[0]["ops"] if plain else 0
    each = (_seconds(plain[-1], clock) - _seconds(plain[0], clock)) / more if more else 0.0
    found = {"op": each if each > 0 else op()}
    for it in staged:
        found["action"] = max(0.0, (_seconds(it, clock) - found["op"] * it["ops"]) / it["actions"])
    return found


def _seconds(step: Mapping[str, Any], clock: Clock) -> float:
    """The median of seconds until the host has issued a step, the device being idle before."""
    with TemporaryDirectory() as name, _absent_peers(prod(step["mesh"].values())):
        for file, text in step["files"].items():
            Path(name, file).write_text(text, encoding="utf-8")
        program, mesh = run_path(str(Path(name, "train.py"))), QuietMesh(step["mesh"], clock.device)
        model, state = program["build"](mesh)
        state.initialise(0)
        batch = Batch(
            *(
                torch.zeros(shape, dtype=torch.int64, device=clock.device)
                for shape in step["inputs"]
            )
        )
        found = list[float]()
        for _ in range(REPEATS + WARM):
            clock.wait()
            start = perf_counter()
            program["train_step"](model, state, batch, 0.0)
            found.append(perf_counter() - start)
        clock.wait()
        return median(found[WARM:])


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
        return replace(axis, group=_Quiet(axis.group)) if axis.group else axis


class _Quiet:
    """In the place of a process group, whose properties it has."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, *_: Any) -> Self:
        return self

    _allgather_base = _reduce_scatter_base = alltoall_base = allreduce

    def wait(self) -> None: ...
