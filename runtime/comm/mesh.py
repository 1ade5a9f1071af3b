"""The mesh of ranks: named axes, their process groups, and this rank's coordinates."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

End = Literal["operand", "result", "operand gradient", "result gradient", "result in backward"]
Role = Literal["state", "working", "gradient"]  # of memory: masters and slots, the weights a model computes with, sums


@dataclass(frozen=True, eq=False, slots=True)
class Axis:
    """One mesh axis, or several as one, as this rank sees it; `group` is a ProcessGroup, None where `size` is 1."""

    name: str
    size: int
    rank: int
    group: Any  # the stubs of ProcessGroup are partial
    watch: "Watch | None" = None

    def ranks(self) -> list[int]:
        """The global ranks along it."""
        return dist.get_process_group_ranks(self.group)


@dataclass(frozen=True, eq=False, slots=True)
class Copies:
    """A flat tensor of the state that all ranks of `axis` hold alike.

    `what` says what it is of each parameter, for instance `exp_avg of `; `element` names one: parameter, global index.
    """

    tensor: Tensor
    axis: Axis
    role: Role
    what: str
    element: Callable[[int], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A message's content: the values' names, or their gradients, for a stage and microbatch, from rank to rank."""

    names: tuple[str, ...]
    is_gradient: bool
    stage: int
    """That which receives it."""
    microbatch: int
    source: int
    target: int


class Watch(Protocol):
    """Looks at values as a run goes, and raises where one is not what its placement says (`sanitize`)."""

    def here(self) -> Any:
        """The line of the program that calls a coercion."""
        ...

    def coerced(self, x: Tensor, axis: Axis, line: Any, end: End) -> None:
        """A coercion's `end`, which should be one value on all ranks of the axis."""
        ...

    def exchanged(self, to: Sequence[int], of: Sequence[int], axis: Axis, line: Any) -> None:
        """How many rows this rank is about to send to each rank of the axis, and to receive of each."""
        ...

    def installed(self, model: nn.Module, copies: Sequence[Copies]) -> None:
        """A model, and the memory of its state."""
        ...

    def microbatch(self, number: int) -> None:
        """The model is about to be called for this microbatch, from 0."""
        ...

    def hashes(self, values: Sequence[Tensor]) -> Tensor:
        """[values, 3] int64: equal if the values are, to the last bit."""
        ...

    def arrived(self, values: Sequence[Tensor], hashes: Tensor, message: "Crossing") -> None:
        """A message's values, and the hashes of what was sent."""
        ...

    def updating(self) -> None:
        """The state is about to change: working copies have served."""
        ...

    def updated(self) -> None:
        """The state has new values."""
        ...


class Mesh:
    """Named axes over all ranks, row-major, outermost first.

    A mesh of one rank needs no process group; any other needs an initialised one of as many ranks.
    """

    def __init__(self, axes: Mapping[str, int], device: torch.device | str = "cpu", watch: Watch | None = None) -> None:
        self.axes = dict(axes)
        self.device = torch.device(device)
        self.watch = watch
        self.device_mesh = self._device_mesh()
        coordinate = self.device_mesh.get_coordinate() if self.device_mesh else [0] * len(self.axes)
        assert coordinate is not None, f"mesh {self.axes}: this rank has no place on it"
        self._coordinate = dict(zip(self.axes, coordinate, strict=True))
        self._cache: dict[tuple[str, ...], Axis] = {}
        if watch is not None:
            self._make_all()

    def _device_mesh(self) -> DeviceMesh | None:
        if self.size(*self.axes) == 1:
            return None
        return init_device_mesh(self.device.type, tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))

    def _make_all(self) -> None:
        """All groups of axes.

        What is compared over which axes follows from what a rank holds, and that differs from stage to stage; but all
        ranks make groups in one order.
        """
        for count in range(1, len(self.axes) + 1):
            for names in combinations(self.axes, count):
                self.axis(*names)

    def size(self, *names: str) -> int:
        """The number of ranks along the named axes together."""
        return prod(self.axes[name] for name in names)

    def rank(self, *names: str) -> int:
        """This rank's index along the named axes together, the first of them outermost."""
        index = 0
        for name in names:
            index = index * self.axes[name] + self._coordinate[name]
        return index

    def axis(self, *names: str) -> Axis:
        """The named axes as one, in mesh order.  Collective on first use: all ranks ask in the same order."""
        names = tuple(name for name in self.axes if name in names)
        if names not in self._cache:
            wide = [name for name in names if self.axes[name] > 1]
            group = self._group(wide)
            self._cache[names] = Axis("*".join(wide or names), self.size(*names), self.rank(*names), group, self.watch)
        return self._cache[names]

    def _group(self, names: list[str]) -> ProcessGroup | None:
        if not names or self.device_mesh is None:
            return None
        if len(names) == 1:
            return self.device_mesh.get_group(names[0])
        if self.size(*names) == self.size(*self.axes):
            return dist.group.WORLD
        return cast(Any, dist).new_group(self._peers(names), use_local_synchronization=True)

    def messages(self, name: str) -> Axis:
        """An axis with a group of its own, for what its ranks send to each other.  Collective on first use.

        Ranks send unequally often, by which what counts a group's collectives would take them to be out of step.
        """
        key = name, "messages"
        if key not in self._cache:
            axis = self.axis(name)
            group = self._group_of(name, range(axis.size)) if axis.size > 1 else None
            self._cache[key] = Axis(name, axis.size, axis.rank, group, self.watch)
        return self._cache[key]

    def among(self, name: str, *ranks: int) -> Axis:
        """Some ranks of an axis as one; to others, an axis of themselves alone.  Collective on first use."""
        key = name, *map(str, ranks)
        if key not in self._cache:
            mine = self.rank(name)
            chosen = ranks if mine in ranks else (mine,)
            group = self._group_of(name, chosen)  # alone too: torch names groups by how many a rank has made
            some = f"{name}[{', '.join(map(str, chosen))}]"
            self._cache[key] = Axis(some, len(chosen), chosen.index(mine), group, self.watch)
        return self._cache[key]

    def _group_of(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        """The group of those ranks of an axis, in which all of them take part."""
        peers = self._peers([name])
        return cast(Any, dist).new_group([peers[rank] for rank in ranks], use_local_synchronization=True)

    def groups(self) -> dict[str, Any]:
        """The process groups of this rank so far, by name: `dp`, `dp*tp`, `pp messages`, `pp[0, 3]`."""
        made = [*self._cache.items()]  # at once: another thread may ask
        return {
            f"{axis.name} messages" if key[-1] == "messages" else axis.name: axis.group
            for key, axis in made
            if axis.size > 1
        }

    def without(self, names: Collection[str]) -> Axis:
        """All axes but the named ones, as one.  Collective on first use."""
        return self.axis(*(name for name in self.axes if name not in names))

    def _peers(self, names: list[str]) -> list[int]:
        """Global ranks that differ from this one on the named axes only, row-major over them."""
        peers = [0]
        for name, size in self.axes.items():
            steps = range(size) if name in names else [self._coordinate[name]]
            peers = [peer * size + step for peer in peers for step in steps]
        return peers
