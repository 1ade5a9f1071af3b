"""Walks the step op by op and finds the peak of live memory.

One layer of each repeat is walked, so that 126 layers cost what 2 do: in forward the last, when
most is saved, and in backward the first that it does.  Layers close to it are walked too where they
have more of buckets in memory (`in_flight`).  Gradients of parameters add up in their buckets as
they come; parts of another gradient add up in the first part, as autograd does it.  Non-goals: what
an allocator loses, and what kernels hold besides `workspace`.
"""

from collections.abc import Container, Iterable, Mapping, Sequence

from attrs import frozen

from ...ir import ITEM_BYTES, Enter, Leave, Op, Region, Stmt, base, results, walk
from ...ops import OPS
from ...ops.protocol import begins
from ...ops.saved_tensors import Device, Local
from ..kernel_tiles import serves
from .aliasing import Storages, get_carried_values
from .in_flight import Passing
from .liveness import (
    Releases,
    find_summed_gradients,
    get_put_off_sizes,
    is_put_off,
    last_reads,
    mirrors,
    moves,
    sums,
    unkept,
    weights_beside,
)
from .reserve import looks_in_update
from .saved_activations import Keeper, Kept, SavedByLayer, find_bound_storages


@frozen
class PeakSnapshot:
    """A moment of the step, and what is in memory then beside what always is.

    op     the op that runs; None for the update, and the reduction of gradients before it
    layers  of the repeats around it: the dim, which layer of forward's order it is, and of how many
    name   the parameter or value that it is about; in backward, the one whose gradient it is
    kept   bytes that forward keeps for backward
    weights    bytes of what layers have gathered for themselves
    gradients  bytes of whole gradients of layers; each rank keeps a part of them as soon as they
               are summed
    other  bytes of values that are on their way, and of gradients
    """

    op: Op | None
    where: str
    layers: tuple[tuple[str, int, int], ...]
    name: str
    kept: int
    weights: int
    gradients: int
    other: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.kept + self.weights + self.gradients + self.other


class Walk:
    """Walks one microbatch; `peaks` has the moment when most is in memory in `forward`, `backward`
    and `update`.

    If it `splits`, backward does not make the gradients of weights, and keeps what they will be
    made from.
    """

    def __init__(
        self, storages: Storages, keeper: Keeper, device: Device, *, splits: bool = False
    ) -> None:
        self._storages, self._keeper = storages, keeper
        self._device: Device = device
        self._splits = splits
        self._releases, self._summed = Releases(storages, keeper), find_summed_gradients(storages)
        self._passing = Passing(storages)
        self._live: dict[str, int] = {}
        self._kept: set[str] = set()
        self._into: dict[str, str] = {}
        bodies = (*walk(storages.program.forward.body), *walk(storages.program.backward.body))
        self._begun = {op.outputs[0].name: op for op in bodies if begins(op)}
        self._where, self._layers = "forward", list[tuple[str, int, int]]()
        self.peaks = {"update": update(storages)}
        # there until backward is done
        self._entering = [*storages.received, *storages.received_gradients]
        self._receive(storages.received)
        self._forward(storages.program.forward.body, None, keeper.all)
        self._where = "backward"
        self._receive(storages.received_gradients)
        self._backward(storages.program.backward.body, storages.program.forward.body)

    @property
    def peak(self) -> PeakSnapshot:
        """The highest of all, the first of several."""
        return max(self.peaks.values(), key=_get_bytes)

    # ---- forward

    def _forward(
        self, body: Sequence[Stmt], region: Region | None, kept: Mapping[str, Kept]
    ) -> None:
        """Walks a body; what it keeps, and what it hands on, is then still there."""
        args, ends = self._get_carries(region)
        entering = (
            self._find_linked_args(region, kept) if region else self._roots(self._storages.received)
        )
        stays = {*kept, *ends, *entering}
        self._kept |= stays - ends
        going = _group_by_last_place(last_reads(body, self._storages, args), stays)
        for i, stmt in enumerate(body):
            gone = going.get(i, [])
            if isinstance(stmt, Region):
                self._forward_layer(stmt, gone, kept)
            else:
                saved = self._keeper.get_saved_tensors(stmt)
                # names with a colon are no values of the IR
                others = {key: tensor.bytes for key, tensor in saved.items() if ":" in key}
                self._run(stmt, others)
            self._free(gone)

    def _forward_layer(self, region: Region, gone: Sequence[str], kept: Mapping[str, Kept]) -> None:
        """Walks the last layer of a repeat in place of all, or the few layers that may have the
        peak.
        """
        layer, before = self._keeper.layers[region.results[0].name], self._live
        for back in self._passing.forward(region):
            self._live = dict(before)
            self._enter(region, layer, gone, back)
            self._forward(region.body, region, layer.kept_by_storage)
            self._leave(region)
        self._live |= {key: kept[key].total for key in find_bound_storages(kept, region)}
        self._kept |= {*kept}

    def _find_linked_args(self, region: Region, kept: Mapping[str, Kept]) -> list[str]:
        """Values that a layer is handed and that are kept, because this layer keeps it or the
        one before does.
        """
        linked = list[str]()
        for arg, end, _ in get_carried_values(region):
            if arg in kept or self._storages.root(end) in kept:
                linked.append(arg)
        return linked

    # ---- backward

    def _backward(
        self, body: Sequence[Stmt], forward: Sequence[Stmt], region: Region | None = None
    ) -> None:
        """Walks a body that is the backward of the body `forward`."""
        args, ends = self._get_carries(region)
        last = last_reads(body, self._storages, args) | unkept(
            body, forward, self._storages, self._keeper
        )
        partial_sums = sums(body, self._storages, last)
        self._into |= partial_sums.into
        stays = {*self._roots(ends if region else self._entering)}
        if self._splits:
            stays.update(self._roots(get_put_off_sizes(self._storages, filter(is_put_off, body))))
        for name, place in self._releases.get_last_places(body, forward).items():
            last[name] = max(place, last.get(name, 0))
        beside = _places_beside_exchanges(body)
        going = _group_by_last_place(last, stays)
        for i, stmt in enumerate(body):
            gone = going.get(i, [])
            if isinstance(stmt, Region):
                self._backward_layer(stmt, gone, forward)
            else:
                self._backward_op(stmt)
            if i not in beside:
                self._free(gone)
            if isinstance(stmt, Op) and (widened := self._get_widened_bytes(stmt)):
                self._look(stmt, widened)
            self._free(gone)  # of a call that was left, only when it is done
            for value in results(stmt):
                if value.name in self._summed or value.name in partial_sums.added:
                    self._live.pop(value.name, None)

    def _backward_op(self, op: Op) -> None:
        """Does an op of backward, unless it belongs to the weights' part and that is done later."""
        if self._splits and is_put_off(op):
            return
        if moves(op, self._summed, self._storages):
            for _ in self._passing.moves(op):
                self._look(op, 0)
            return
        first = self._storages.recomputed.get(op.outputs[0].name)
        self._passing.makes(value.name for value in op.outputs)
        self._run(op, self._keeper.others(first) if first else {})

    def _backward_layer(self, region: Region, gone: Sequence[str], forward: Sequence[Stmt]) -> None:
        """Walks the first layer of a repeat's backward, which belongs to forward's last layer, or
        the few layers that may have the peak.
        """
        mirror = self._find_mirror(region, forward)
        layer = SavedByLayer({}, 0, 0)
        if mirror:
            layer = self._keeper.layers[mirror.results[0].name]
            self._free(find_bound_storages(self._live, mirror))
        before, layers = self._live, self._storages.program.size(region.dim)
        left = sum(get_put_off_sizes(self._storages, [region]).values())
        for on in self._passing.backward(region):
            self._live = dict(before)
            is_forwards_first = 0 < on == layers - 1  # whose input is what the repeat was handed
            gone_now = [key for key in gone if is_forwards_first or key not in self._kept]
            self._enter(region, layer, gone_now, on)
            if self._splits:  # layers that are done leave what others may keep more than
                self._live[_others(region)] = max(
                    self._live[_others(region)], left - left // layers
                )
            if mirror:
                self._live |= self._last_layer(mirror, layer)
                self._backward(region.body, mirror.body, region)
                self._free(find_bound_storages(self._live, mirror))
            else:
                self._backward(region.body, (), region)
            self._leave(region)
        self._free(gone)
        if self._splits:
            self._live[f"left by {region.dim}"] = left

    def _find_mirror(self, region: Region, forward: Sequence[Stmt]) -> Region | None:
        """Forward's repeat whose backward a repeat is, None where there is none."""
        for stmt in forward:
            if isinstance(stmt, Region) and mirrors(region, stmt, self._storages):
                return stmt
        return None

    def _last_layer(self, region: Region, layer: SavedByLayer) -> dict[str, int]:
        """Values that the last layer of a repeat kept, except the ones it handed on: these are
        the repeat's result.
        """
        args, ends = self._get_carries(region)
        sizes: dict[str, int] = {}
        for key in find_bound_storages(layer.kept_by_storage, region):
            if key not in ends:
                sizes[key] = layer.kept_by_storage[key].total
        for arg in self._find_linked_args(region, layer.kept_by_storage):
            sizes[arg] = self._storages.bytes(arg)
        if self._storages.program.size(region.dim) > 1:
            return sizes
        # of a single layer, what it is handed is counted where it was made
        return {key: size for key, size in sizes.items() if key not in args}

    # ---- repeats

    def _get_carries(self, region: Region | None) -> tuple[set[str], set[str]]:
        """Values that a layer of a repeat is handed, and the ones it hands on; none without a
        repeat.
        """
        if not region:
            return set(), set()
        links = get_carried_values(region)
        return {arg for arg, _, _ in links}, {self._storages.root(end) for _, end, _ in links}

    def _enter(
        self, region: Region, layer: SavedByLayer, gone: Iterable[str], before_last: int
    ) -> None:
        """Adds what the layers before it keep, and what this one is handed; `gone` is what
        nothing needs after it.
        """
        layers = self._storages.program.size(region.dim)
        number = layers - before_last
        self._layers.append((region.dim, number, layers))
        self._live[_others(region)] = layer.first(max(number - 1, 0))
        self._kept.add(_others(region))
        self._free(gone)
        for arg in region.args:
            if arg.enter is Enter.CARRY:
                is_first = self._where == "backward" and not before_last
                alone = (layers > 1 and not is_first) or self._root(arg.source) not in self._live
                self._live[arg.value.name] = self._storages.bytes(arg.value.name) if alone else 0

    def _leave(self, region: Region) -> None:
        """Removes all of a layer but what it hands on."""
        self._layers.pop()
        self._free([_others(region), *find_bound_storages(self._live, region)])
        for end, value in zip(region.yields, region.results, strict=True):
            if (
                end.leave is Leave.LAST
                and self._root(value.name) == value.name
                and value.name not in self._summed
            ):
                self._live[value.name] = self._storages.bytes(value.name)

    # ---- ops

    def _run(self, op: Op, others: Mapping[str, int]) -> None:
        """Makes an op's results, and `others` that it keeps besides.

        Where an op waits for an exchange, what has come is its result, or is copied into it.
        """
        exchange = self._begun.get(op.inputs[0]) if OPS[op.kind].awaits else None
        if exchange and not OPS[exchange.kind].copies_received(self._storages.program, exchange):
            self._free(op.inputs)
        for value in op.outputs:
            root = self._root(value.name)
            # in another's memory nothing is added up
            if not self._live.get(root) and not self._storages.is_permanent(root):
                self._live[root] = self._storages.bytes(value.name)
        self._live |= others
        types = tuple(self._storages.types[name] for name in op.inputs)
        program = self._storages.program
        local = Local(
            program, op, types, (True,) * len(types), self._device, serves(program, op, types)
        )
        self._look(op, OPS[op.kind].workspace(local))

    def _get_widened_bytes(self, op: Op) -> int:
        """Bytes of the copy of a parameter's gradient that the CPU makes to add it to its bucket
        in a wider element type.
        """
        if self._device != "cpu":
            return 0
        program = self._storages.program
        wide = ITEM_BYTES[program.params[0].type.dtype]
        largest = 0
        for value in op.outputs:
            if value.name in self._summed and ITEM_BYTES[value.type.dtype] < wide:
                largest = max(largest, program.elements(value.type) * wide)
        return largest

    def _look(self, op: Op, workspace: int) -> None:
        """Notes this moment, when an op takes `workspace` bytes besides, if memory holds more
        than ever before.
        """
        kept = sum(size for key, size in self._live.items() if key in self._kept)
        other = sum(self._live.values()) - kept + workspace
        buckets = self._passing.weights, self._passing.gradients
        self._note(
            PeakSnapshot(
                op, self._where, tuple(self._layers), self._about(op), kept, *buckets, other
            )
        )

    def _note(self, moment: PeakSnapshot) -> None:
        highest = self.peaks.get(self._where, moment)
        self.peaks[self._where] = max(highest, moment, key=_get_bytes)

    def _of_others(self) -> int:
        """Bytes that the other layers of the outermost repeat keep."""
        if not self._layers:
            return 0
        return self._live.get(f"other {self._layers[0][0]}", 0)

    def _about(self, op: Op) -> str:
        """A parameter that the op reads, or else what it makes."""
        for name in op.inputs:
            root = self._storages.root(name)
            if root in self._storages.state:
                return base(root)
        name = op.inputs[-1] if op.kind in ("pack", "begin") else op.outputs[0].name
        return base(name).removeprefix("d_").removeprefix("_")

    def _roots(self, names: Iterable[str]) -> list[str]:
        return [*map(self._root, names)]

    def _root(self, name: str) -> str:
        root = self._storages.root(name)
        return self._into.get(root, root)

    def _receive(self, names: Iterable[str]) -> None:
        for name in names:
            self._live[self._root(name)] = self._storages.bytes(name)

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self._live.pop(name, None)


def _group_by_last_place(last: Mapping[str, int], stays: Container[str]) -> dict[int, list[str]]:
    """The storages that go after each statement, by the place of the last statement that needs
    them; without the ones that stay.
    """
    going: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in stays:
            going.setdefault(place, []).append(name)
    return going


def _places_beside_exchanges(body: Sequence[Stmt]) -> set[int]:
    """The places of statements that make gradients of weights while an exchange is under way."""
    places = set[int]()
    for stmt in body:
        if isinstance(stmt, Op) and begins(stmt):
            places.update(weights_beside(stmt, body))
    return places


def _get_bytes(moment: PeakSnapshot) -> int:
    return moment.bytes


def _others(region: Region) -> str:
    """The storage of all that the other layers of a repeat keep."""
    return f"other {region.dim}"


def update(storages: Storages) -> PeakSnapshot:
    """The update, and the reduction of gradients before it, with what a run looks at then."""
    other = _get_largest_cast_bytes(storages) + looks_in_update(storages.program)
    return PeakSnapshot(None, "update", (), "", 0, 0, 0, other)


def _get_largest_cast_bytes(storages: Storages) -> int:
    """Bytes of the largest gradient that is cast for its reduction; they go one after the other.

    Casts of layers' gradients have gone by then; casts of stages' gradients are counted in the row.
    """
    pipeline = storages.program.pipeline
    stacked = {bucket.dim for bucket in storages.program.buckets if bucket.layers or pipeline}
    largest = 0
    for op in storages.program.region.body:
        if not isinstance(op, Op) or op.kind != "cast" or storages.is_permanent(op.inputs[0]):
            continue
        sent = op.outputs[0]
        size = storages.bytes(sent.name)
        if stacked.isdisjoint(sent.type.dims) and size < storages.bytes(op.inputs[0]):
            largest = max(largest, size)
    return largest
