"""The mesh of ranks: named axes, their process groups, and this rank's coordinates."""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import c10d
from .store import meet

End = Literal["operand", "result", "operand gradient", "result gradient", "result in backward"]
LIMIT = timedelta(minutes=30)
"""The limit of a call, after which torch ends a rank, where a run does not say."""
_Key = tuple[str, ...]
# of memory: masters and slots, the weights a model computes with, sums
Role = Literal["state", "working", "gradient"]


@dataclass(eq=False, slots=True)
class Axis:
    """One mesh axis, or several as one, as this rank sees it; only the count `asides` changes.

    `group` is a ProcessGroup, None where `size` is 1, or as long as groups are only asked for
    (`Mesh.asking`).  `asides` counts the calls in the group that are not the plan's, made to
    compare copies.
    """

    name: str
    size: int
    rank: int
    group: Any  # the stubs of ProcessGroup are partial
    watch: "Watch | None" = None
    asides: int = 0

    def ranks(self) -> list[int]:
        """The global ranks along it."""
        return dist.get_process_group_ranks(self.group)

    def line(self) -> Any:
        """The line of the program, in a sanitized run."""
        return self.watch and self.watch.here()

    def show_to_watch(self, x: Tensor, end: "End", line: Any = None) -> None:
        """Shows the `end` of a coercion to a sanitized run's watch; by default with the current
        line of the program.
        """
        if self.watch is not None:
            self.watch.see_coercion(x, self, line or self.watch.here(), end)


@dataclass(frozen=True, eq=False, slots=True)
class Copies:
    """A flat tensor of the state that all ranks of `axis` hold alike.

    `what` says how it relates to each parameter, for instance `exp_avg of `.  `element` names one
    of its elements: parameter, global index.
    """

    tensor: Tensor
    axis: Axis
    role: Role
    prefix: str
    element: Callable[[int], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A message's content: the values' names, or their gradients, for a stage and microbatch,
    from rank to rank.
    """

    names: tuple[str, ...]
    is_gradient: bool
    stage: int
    """The stage that receives it."""
    microbatch: int
    source: int
    target: int


class Watch(Protocol):
    """Looks at values as a run goes, and raises where one is not what its placement says
    (`sanitize`).
    """

    def here(self) -> Any:
        """The line of the program that calls a coercion."""

    def see_coercion(self, x: Tensor, axis: Axis, line: Any, end: End) -> None:
        """A coercion's `end`, which should be one value on all ranks of the axis."""

    def see_exchange(self, to: Sequence[int], of: Sequence[int], axis: Axis, line: Any) -> None:
        """How many rows this rank is about to send to each rank of the axis, and to receive of
        each.
        """

    def see_state(self, model: nn.Module, copies: Sequence[Copies]) -> None:
        """A model, and the memory of its state."""

    def microbatch(self, number: int) -> None:
        """The model is about to be called for this microbatch, from 0."""

    def hashes(self, values: Sequence[Tensor]) -> Tensor:
        """[values, 3] int64: equal if the values are, to the last bit."""
        ...

    def check_message(self, values: Sequence[Tensor], hashes: Tensor, message: "Crossing") -> None:
        """A message's values, and the hashes of what was sent."""

    def see_update_begin(self) -> None:
        """The state is about to change: working copies are no longer used."""

    def see_update_end(self) -> None:
        """The state has new values."""


class Mesh:
    """Named axes over all ranks, row-major, outermost first.

    A mesh of one rank needs no process group; any other needs an initialised one of as many ranks.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        device: torch.device | str = "cpu",
        watch: Watch | None = None,
        limit: timedelta = LIMIT,
    ) -> None:
        self.axes = dict(axes)
        self._limit = limit
        self.device = torch.device(device)
        self.watch = watch
        self._coordinate = self._place()
        self._cache: dict[_Key, Axis] = {}
        self._asked: list[_Key] | None = None
        for name in self.axes:
            self._get_axis(("axis", name))
        if watch is not None:
            self._make_all()

    def _place(self) -> dict[str, int]:
        """This rank's index along each axis."""
        ranks = self.size(*self.axes)
        world = 1
        if dist.is_initialized() and ranks > 1:
            world = dist.get_world_size()
        assert world == ranks, f"mesh {self.axes}: {ranks} ranks, but {world} in the process group"
        return self._place_of(dist.get_rank() if ranks > 1 else 0)

    def _place_of(self, number: int) -> dict[str, int]:
        """The index of a global rank along each axis."""
        coordinate: dict[str, int] = {}
        for name, size in [*self.axes.items()][::-1]:
            number, coordinate[name] = divmod(number, size)
        return coordinate

    @cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """Torch's own mesh of the same groups; None for one rank.  Collective on first use."""
        if self.size(*self.axes) == 1:
            return None
        groups = [
            self.axis(name).group or self._group(f"{name} alone", [name]) for name in self.axes
        ]
        ranks = torch.arange(self.size(*self.axes), device="cpu").view(*self.axes.values())
        return DeviceMesh.from_group(
            groups, self.device.type, ranks, mesh_dim_names=tuple(self.axes)
        )

    @contextmanager
    def asking(self) -> Generator[None]:
        """Makes the groups that any rank asks for inside the block at its end, on all ranks in one
        order.

        Ranks of different stages ask for different ones, and a communicator is split by all ranks
        or none.
        """
        self._asked = []
        yield
        asked, self._asked = self._asked, None
        if self.size(*self.axes) == 1:
            return
        words = meet("groups", "\n".join(map(",".join, asked)))
        keys: set[str] = set()
        for word in words:
            keys.update(word.splitlines())
        for key in sorted(keys):
            self._set_group(tuple(key.split(",")))

    def _make_all(self) -> None:
        """All groups of axes.

        A rank compares its state over axes that follow from its parameters, which differ from stage
        to stage; but all ranks make groups in one order.
        """
        for count in range(1, len(self.axes) + 1):
            for names in combinations(self.axes, count):
                self.axis(*names)

    def size(self, *names: str) -> int:
        """The number of ranks along the named axes together."""
        return prod(self.axes[name] for name in names)

    def rank(self, *names: str) -> int:
        """This rank's index along the named axes together, the first of them outermost."""
        return self._index(self._coordinate, names)

    def rank_of(self, number: int, *names: str) -> int:
        """The same for another rank, by its number in the job."""
        return self._index(self._place_of(number), names)

    def _index(self, coordinate: Mapping[str, int], names: Sequence[str]) -> int:
        index = 0
        for name in names:
            index = index * self.axes[name] + coordinate[name]
        return index

    def axis(self, *names: str) -> Axis:
        """The named axes as one, in mesh order.

        Collective on first use: all ranks ask in the same order.
        """
        names = tuple(name for name in self.axes if name in names)
        return self._get_axis(("axis", *names))

    def messages(self, name: str) -> Axis:
        """An axis with a group of its own, for messages that its ranks send to each other.
        Collective on first use.

        Ranks send unequally often: in a group with collectives, a count of the group's calls would
        show ranks out of step.
        """
        return self._get_axis(("messages", name))

    def among(self, name: str, *ranks: int) -> Axis:
        """Some ranks of an axis as one; to others, an axis of themselves alone.

        Collective on first use.
        """
        return self._get_axis(("among", name, *map(str, ranks)))

    def _get_axis(self, key: _Key) -> Axis:
        """The axis of a key: its kind, its names and, for some kinds, ranks."""
        if key not in self._cache:
            self._cache[key] = self._axis_without_group(key)
            if self._asked is None:
                self._set_group(key)
            else:
                self._asked.append(key)
        return self._cache[key]

    def _axis_without_group(self, key: _Key) -> Axis:
        """An axis, as yet without a group."""
        kind, *names = key
        if kind == "among":
            name, *ranks = names
            mine, chosen = self.rank(name), [*map(int, ranks)]
            if mine not in chosen:
                chosen = [mine]
            return Axis(
                f"{name}[{', '.join(map(str, chosen))}]",
                len(chosen),
                chosen.index(mine),
                None,
                self.watch,
            )
        wide = [name for name in names if self.axes[name] > 1]
        return Axis("*".join(wide or names), self.size(*names), self.rank(*names), None, self.watch)

    def _set_group(self, key: _Key) -> None:
        """Gives an axis its group.  An axis of one rank has none, and axes of one rank beside
        others change nothing.
        """
        axis, (kind, *names) = self._cache.setdefault(key, self._axis_without_group(key)), key
        wide = [name for name in names if self.axes.get(name, 1) > 1]
        if kind == "among":
            self._give_group(axis, axis.name, names[:1], [*map(int, names[1:])])
        elif not wide:
            return
        elif kind == "messages":
            self._give_group(axis, f"{axis.name} messages", wide)
        elif axis.size == self.size(*self.axes):
            axis.group = dist.group.WORLD
        elif wide == names:
            self._give_group(axis, axis.name, wide)
        else:
            axis.group = self.axis(*wide).group

    def _give_group(
        self,
        axis: Axis,
        description: str,
        names: Sequence[str],
        chosen: Sequence[int] | None = None,
    ) -> None:
        """Makes a group for an axis; `c10d.group_of` makes a call in it that is not the plan's."""
        axis.group = self._group(description, names, chosen)
        axis.asides += 1

    def _group(
        self, description: str, names: Sequence[str], chosen: Sequence[int] | None = None
    ) -> Any:
        """The group of this rank along some axes.  With `chosen`, along one axis: the chosen ranks
        make a group, and each other rank one by itself.
        """
        rows = self._rows(names)
        if chosen is not None:
            parts: list[list[int]] = []
            for row in rows:
                parts += _parts(row, chosen)
            rows = parts
        return c10d.group_of(rows, description, self._limit)

    def _rows(self, names: Collection[str]) -> list[list[int]]:
        """A row for each place on the other axes: the global ranks that differ on the named axes
        only, row-major.
        """
        others_first = sorted(range(len(self.axes)), key=lambda dim: [*self.axes][dim] in names)
        ranks = (
            torch.arange(self.size(*self.axes), device="cpu")
            .view(*self.axes.values())
            .permute(others_first)
        )
        return cast(Any, ranks.reshape(-1, self.size(*names))).tolist()

    def groups(self) -> dict[str, Any]:
        """The process groups of this rank so far, by name: `dp`, `dp*tp`, `pp messages`, `pp[0,
        3]`.
        """
        cached_axes = [*self._cache.items()]  # at once: another thread may ask
        groups: dict[str, Any] = {}
        for (kind, *_), axis in cached_axes:
            if axis.size == 1 or axis.group is None:
                continue
            name = axis.name
            if kind == "messages":
                name = f"{name} messages"
            groups[name] = axis.group
        return groups

    def asides(self) -> Counter[Any]:
        """The calls of each group beside the plan's."""
        counts = Counter[Any]()
        for axis in [*self._cache.values()]:
            if axis.asides:
                counts[axis.group] += axis.asides
        return counts

    def without(self, names: Collection[str]) -> Axis:
        """All axes but the named ones, as one.  Collective on first use."""
        return self.axis(*(name for name in self.axes if name not in names))


def _parts(row: Sequence[int], chosen: Sequence[int]) -> list[list[int]]:
    """The chosen places of a row as one, and the others by themselves."""
    parts = [[row[place] for place in chosen]]
    for place, rank in enumerate(row):
        if place not in chosen:
            parts.append([rank])
    return parts
