"""Parameters as the plan declares them: a global shape, how it is split over the mesh, and its
initial values.

Initial values are a function of (seed, name, global index), so every sharding of a model starts the
same.

Non-goals: no memory is allocated here; the state engine does that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, tau

import torch
from torch import Tensor, nn

from ..comm.mesh import Mesh
from ..ops.counter_rng import key_of, uniform

_CHUNK = 1 << 20  # elements whose temporaries, of 8 bytes each, are in memory at the same time


@dataclass(frozen=True, slots=True)
class Init:
    """A distribution of initial values; std 0 is the constant `mean`."""

    mean: float
    std: float


def normal(std: float) -> Init:
    """Normally distributed around 0."""
    return Init(0.0, std)


def ones() -> Init:
    """All one."""
    return Init(1.0, 0.0)


def zeros() -> Init:
    """All zero."""
    return Init(0.0, 0.0)


@dataclass(frozen=True)
class Spec:
    """A parameter's global shape, the axes that split each dim (outer first), and its initial
    values.
    """

    shape: tuple[int, ...]
    split: Mapping[int, tuple[str, ...]]
    init: Init

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of one rank's part."""
        return tuple(
            size // mesh.size(*self.split.get(dim, ())) for dim, size in enumerate(self.shape)
        )

    def offsets(self, mesh: Mesh) -> tuple[int, ...]:
        """Where this rank's part begins in each global dim."""
        local = self.local_shape(mesh)
        return tuple(size * mesh.rank(*self.split.get(dim, ())) for dim, size in enumerate(local))


class Weight(nn.Parameter):
    """A parameter without memory (meta device), of this rank's shape, that carries its `spec`."""

    spec: Spec


def weight(
    mesh: Mesh, *shape: int, init: Init, shard: Mapping[int, str | tuple[str, ...]] | None = None
) -> Weight:
    """Declares a parameter of this global shape; `shard` maps a dim to the axis, or the axes,
    outer first, that split it.
    """
    split = dict[int, tuple[str, ...]]()
    for dim, axes in (shard or {}).items():
        split[dim] = (axes,) if isinstance(axes, str) else axes
    spec = Spec(shape, split, init)
    for dim, axes in spec.split.items():
        assert shape[dim] % mesh.size(*axes) == 0, (
            f"weight {shape}: dim {dim} is not divisible over {axes}"
        )
    parameter = Weight(torch.empty(spec.local_shape(mesh), device="meta"))
    parameter.spec = spec
    return parameter


def initialise(local: Tensor, spec: Spec, mesh: Mesh, seed: int, name: str) -> None:
    """Fills this rank's part of the parameter `name` in place, on its own device."""
    if spec.init.std == 0:
        local.fill_(spec.init.mean)
        return
    key = key_of(f"{seed}/{name}")
    flat = local.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        index = _global_index(start, chunk, local.shape, spec, spec.offsets(mesh))
        chunk.copy_(_normal(key, index) * spec.init.std + spec.init.mean)


def _global_index(
    start: int, chunk: Tensor, shape: tuple[int, ...], spec: Spec, offsets: tuple[int, ...]
) -> Tensor:
    """Row-major index in the whole parameter of the local elements start, start + 1, …, int64."""
    position = torch.arange(start, start + chunk.numel(), device=chunk.device)
    index = torch.zeros_like(position)
    for dim in reversed(range(len(shape))):
        index += (position % shape[dim] + offsets[dim]) * prod(spec.shape[dim + 1 :])
        position //= shape[dim]
    return index


def _normal(key: int, index: Tensor) -> Tensor:
    """One standard normal number for each index, float64 (Box and Muller, 1958)."""
    radius = (-2 * uniform(key, 2 * index).log()).sqrt()
    return radius * (tau * uniform(key, 2 * index + 1)).cos()
