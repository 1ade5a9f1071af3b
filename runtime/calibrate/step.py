"""Seconds of what a step does besides its model: the optimizer's update, and adding up gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..comm.mesh import Mesh
from ..state.buckets import Bucket
from ..state.engine import TrainState
from ..state.optimizers import AdamW, ParamGroup
from ..state.parameters import normal, weight
from .calls import Row, row_of
from .clock import Clock


def update_rows(sizes: Sequence[int], clock: Clock) -> Iterator[Row]:
    """Updates of a number of elements, clipped, with gradients zeroed after them."""
    for size in sizes:
        mesh = Mesh({}, clock.device)
        model = torch.nn.Module()
        model.w = weight(mesh, size, init=normal(0.02))
        state = TrainState(model, mesh, {"all": Bucket(ParamGroup("w"))}, AdamW())
        state.initialise(0)
        yield row_of({"table": "moved", "op": "update", "bytes": 28 * size}, clock.median(_update(state, clock)))


def _update(state: TrainState, clock: Clock) -> Callable[[], Callable[[], Any]]:
    scale, skip = torch.ones((), device=clock.device), torch.zeros((), dtype=torch.bool, device=clock.device)

    def prepared() -> Callable[[], Any]:
        clock.cool()
        return lambda: state.update(1e-3, skip=skip, scale=scale)

    return prepared
