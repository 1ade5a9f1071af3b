"""A small state on any mesh, for the tests of checkpoints."""

from typing import Any

import torch
from torch import Tensor, nn

from scalec.runtime import AdamW, Bucket, Mesh, ParamGroup, TrainState, normal, ones, weight

SHAPES = {"norm": (8,), "up": (12, 8), "down": (8, 12), "both": (8, 8)}
SPLITS: dict[str, dict[int, tuple[str, ...]]] = {
    "norm": {},
    "up": {0: ("tp",)},
    "down": {1: ("tp",)},
    "both": {0: ("dp", "tp")},
}


class Model(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            split = {
                d: tuple(a for a in axes if a in mesh.axes) for d, axes in SPLITS[name].items()
            }
            self.register_parameter(
                name, weight(mesh, *shape, shard=split, init=ones() if not split else normal(1))
            )


def modelled(
    axes: dict[str, int],
    seed: int,
    kind: type[TrainState] = TrainState,
    dtype: torch.dtype = torch.float32,
) -> tuple[Model, TrainState]:
    """A model and its state, with initial values."""
    mesh = Mesh(axes)
    model, bucket = (
        Model(mesh),
        Bucket(ParamGroup("norm"), ParamGroup("up", "down", "both", weight_decay=0.1)),
    )
    state = kind(model, mesh, {"all": bucket}, AdamW(), dtype)
    state.initialise(seed)
    return model, state


def made(
    axes: dict[str, int],
    seed: int,
    kind: type[TrainState] = TrainState,
    dtype: torch.dtype = torch.float32,
) -> TrainState:
    """A state with initial values."""
    return modelled(axes, seed, kind, dtype)[1]


def update(state: TrainState, step: int) -> None:
    """A gradient that is a function of the parameter, so that it is the same on every mesh."""
    record = {key: _own(value) for key, value in state.state_dict().items() if "/" not in key}
    for flat in state.gradients().values():
        flat.copy_(
            torch.cat([record[name].flatten() for name in ("norm", "up", "down", "both")]).cos()
        )
    state.update(0.1, scale=torch.tensor(1.0 / (step + 1)), skip=torch.tensor(False))


def _own(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def whole(state: TrainState) -> dict[str, Tensor]:
    """All of its tensors, copied.  Collective."""
    values: dict[str, Any] = state.state_dict()
    return {
        key: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone()
        for key, v in values.items()
    }
