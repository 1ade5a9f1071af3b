"""Walks the step op by op and finds the peak of live memory.

One layer of each repeat is walked, so that 126 layers cost what 2 do: in forward the last, when
most is saved, and in backward the first that it does; with those close to it that have more of
buckets in memory (`in_flight`).  Gradients of parameters add up in their buckets as they come,
parts of another gradient in the first of them, as autograd does it.  Non-goals: what an allocator
loses, and what kernels hold besides `workspace`.
"""

from collections.abc import Container, Iterable, Mapping, Sequence

from attrs import frozen

from ...ir import ITEM_BYTES, Enter, Leave, Op, Region, Stmt, base, results, walk
from ...ops import OPS
from ...ops.experts import EXCHANGE, WAIT, begins, regroups
from ...ops.saved_tensors import Device, Local
from ..kernel_tiles import serves
from .aliasing import Storages, carried
from .in_flight import Passing
from .liveness import (
    Releases,
    is_put_off,
    last_reads,
    mirrors,
    moves,
    put_off,
    summed,
    sums,
    unkept,
    weights_beside,
)
from .reserve import looks_in_update
from .saved_activations import Keeper, Kept, SavedByLayer, bound


@frozen
class PeakSnapshot:
    """A moment of the step, and what is in memory then beside what always is.

    op     that runs; None for the update, and the reduction of gradients before it
    layers  of the repeats around it: the dim, which layer of forward's order it is, and of how many
    name   the parameter or value that it is about, in backward that of which it is the gradient
    kept   bytes that forward keeps for backward
    weights    bytes of what layers have gathered for themselves
    gradients  bytes of whole gradients of layers, of which each rank keeps a part as soon as they
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

    If it `splits`, backward does not make the gradients of weights, and keeps what they are made
    of.
    """

    def __init__(
        self, storages: Storages, keeper: Keeper, device: Device, *, splits: bool = False
    ) -> None:
        self._storages, self._keeper = storages, keeper
        self._device: Device = device
        self._splits = splits
        self._releases, self._summed = Releases(storages, keeper), summed(storages)
        self._passing = Passing(storages)
        self._live: dict[str, int] = {}
        self._kept: set[str] = set()
        self._into: dict[str, str] = {}
        bodies = (*walk(storages.program.forward.body), *walk(storages.program.backward.body))
        self._begun = {op.outputs[0].name: op for op in bodies if begins(op)}
        self._where, self._layers = "forward", list[tuple[str, int, int]]()
        self.peaks = {"update": update(storages)}
        # there until backward is done
        self._given = [*storages.received, *storages.received_gradients]
        self._live |= {self._root(name): storages.bytes(name) for name in storages.received}
        self._forward(storages.program.forward.body, None, keeper.all)
        self._where = "backward"
        self._live |= {
            self._root(name): storages.bytes(name) for name in storages.received_gradients
        }
        self._backward(storages.program.backward.body, storages.program.forward.body)

    @property
    def peak(self) -> PeakSnapshot:
        """The highest of all, the first of several."""
        return max(self.peaks.values(), key=lambda it: it.bytes)

    # ---- forward

    def _forward(
        self, body: Sequence[Stmt], region: Region | None, kept: Mapping[str, Kept]
    ) -> None:
        """Walks a body; what it keeps, and what it hands on, is then still there."""
        args, ends = self._handed(region)
        stays = {
            *kept,
            *ends,
            *(self._linked(region, kept) if region else self._roots(self._storages.received)),
        }
        self._kept |= stays - ends
        going = _going(last_reads(body, self._storages, args), stays)
        for i, stmt in enumerate(body):
            gone = going.get(i, [])
            if isinstance(stmt, Region):
                self._forward_layer(stmt, gone, kept)
            else:
                self._run(
                    stmt,
                    {key: it.bytes for key, it in self._keeper.saved(stmt).items() if ":" in key},
                )
            self._free(gone)

    def _forward_layer(self, region: Region, gone: Sequence[str], kept: Mapping[str, Kept]) -> None:
        """The last layer of a repeat, or those one of which has the peak, in place of all."""
        layer, before = self._keeper.layers[region.results[0].name], self._live
        for back in self._passing.forward(region):
            self._live = dict(before)
            self._enter(region, layer, gone, back)
            self._forward(region.body, region, layer.found)
            self._leave(region)
        self._live |= {key: kept[key].total for key in bound(kept, region)}
        self._kept |= {*kept}

    def _linked(self, region: Region, found: Mapping[str, Kept]) -> list[str]:
        """Values that a layer is handed and that are kept, because this layer keeps it or the
        one before does.
        """
        return [
            arg
            for arg, end, _ in carried(region)
            if arg in found or self._storages.root(end) in found
        ]

    # ---- backward

    def _backward(
        self, body: Sequence[Stmt], forward: Sequence[Stmt], region: Region | None = None
    ) -> None:
        """Walks a body that is the backward of the body `forward`."""
        args, ends = self._handed(region)
        last = last_reads(body, self._storages, args) | unkept(
            body, forward, self._storages, self._keeper
        )
        found = sums(body, self._storages, last)
        self._into |= found.into
        ends = {self._root(end) for end in ends} if region else {*self._roots(self._given)}
        ends |= (
            {*self._roots(put_off(self._storages, filter(is_put_off, body)))}
            if self._splits
            else set()
        )
        last |= {
            name: max(at, last.get(name, 0))
            for name, at in self._releases.of(body, forward).items()
        }
        exchanges = [stmt for stmt in body if isinstance(stmt, Op) and begins(stmt)]
        beside = {i for exchange in exchanges for i in weights_beside(exchange, body)}
        going = _going(last, ends)
        for i, stmt in enumerate(body):
            gone = going.get(i, [])
            if isinstance(stmt, Region):
                self._backward_layer(stmt, gone, forward)
            elif self._splits and is_put_off(stmt):
                pass
            elif moves(stmt, self._summed, self._storages):
                for _ in self._passing.moves(stmt):
                    self._look(stmt, 0)
            else:
                first = self._storages.recomputed.get(stmt.outputs[0].name)
                self._passing.makes(value.name for value in stmt.outputs)
                self._run(stmt, self._keeper.others(first) if first else {})
            self._free(gone if i not in beside else ())
            if isinstance(stmt, Op) and (widened := self._widened(stmt)):
                self._look(stmt, widened)
            self._free(gone)  # of a call that was left, only when it is done
            self._free(
                v.name for v in results(stmt) if v.name in self._summed or v.name in found.added
            )

    def _backward_layer(self, region: Region, gone: Sequence[str], forward: Sequence[Stmt]) -> None:
        """The first layer of a repeat's backward, that of forward's last layer, or those one of
        which has the peak.
        """
        repeats = (it for it in forward if isinstance(it, Region))
        mirror = next((it for it in repeats if mirrors(region, it, self._storages)), None)
        layer = self._keeper.layers[mirror.results[0].name] if mirror else SavedByLayer({}, 0, 0)
        self._free(bound(self._live, mirror) if mirror else ())
        before, layers = self._live, self._storages.program.size(region.dim)
        left = sum(put_off(self._storages, [region]).values())
        for on in self._passing.backward(region):
            self._live = dict(before)
            is_forwards_first = 0 < on == layers - 1  # whose input is what the repeat was handed
            self._enter(
                region,
                layer,
                [key for key in gone if is_forwards_first or key not in self._kept],
                on,
            )
            if self._splits:  # layers that are done leave what others may keep more than
                self._live[_others(region)] = max(
                    self._live[_others(region)], left - left // layers
                )
            self._live |= self._last_layer(mirror, layer) if mirror else {}
            self._backward(region.body, mirror.body if mirror else (), region)
            self._free(bound(self._live, mirror) if mirror else ())
            self._leave(region)
        self._free(gone)
        if self._splits:
            self._live[f"left by {region.dim}"] = left

    def _last_layer(self, region: Region, layer: SavedByLayer) -> dict[str, int]:
        """Values that the last layer of a repeat kept, but for those it handed on: these are
        the repeat's result.
        """
        args, ends = self._handed(region)
        found = {
            key: layer.found[key].total for key in bound(layer.found, region) if key not in ends
        }
        found |= {arg: self._storages.bytes(arg) for arg in self._linked(region, layer.found)}
        alone = self._storages.program.size(region.dim) > 1
        return {key: size for key, size in found.items() if alone or key not in args}

    # ---- repeats

    def _handed(self, region: Region | None) -> tuple[set[str], set[str]]:
        """Values that a layer of a repeat is handed, and those it hands on."""
        links = carried(region) if region else []
        return {arg for arg, _, _ in links}, {self._storages.root(end) for _, end, _ in links}

    def _enter(
        self, region: Region, layer: SavedByLayer, gone: Iterable[str], before_last: int
    ) -> None:
        """Adds what the layers before it keep, and what this one is handed; `gone` is what
        nothing needs after it.
        """
        layers, at = (size := self._storages.program.size(region.dim)), size - before_last
        self._layers.append((region.dim, at, layers))
        self._live[_others(region)] = layer.first(max(at - 1, 0))
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
        self._free([_others(region), *bound(self._live, region)])
        for end, value in zip(region.yields, region.results, strict=True):
            if (
                end.leave is Leave.LAST
                and self._root(value.name) == value.name
                and value.name not in self._summed
            ):
                self._live[value.name] = self._storages.bytes(value.name)

    # ---- ops

    def _run(self, op: Op, others: Mapping[str, int]) -> None:
        """Makes an op's results, and what else it keeps; rows that have come are the result, or
        are copied into it.
        """
        way = self._begun.get(op.inputs[0]) if op.kind == WAIT.name else None
        if way and not (way.kind == EXCHANGE.name and regroups(self._storages.program, way)):
            self._free(op.inputs)
        for value in op.outputs:
            root = self._root(value.name)
            # in another's memory nothing is added up
            if not self._live.get(root) and not self._storages.held(root):
                self._live[root] = self._storages.bytes(value.name)
        self._live |= others
        types = tuple(self._storages.types[name] for name in op.inputs)
        program = self._storages.program
        local = Local(
            program, op, types, (True,) * len(types), self._device, serves(program, op, types)
        )
        self._look(op, OPS[op.kind].workspace(local))

    def _widened(self, op: Op) -> int:
        """The copy of a parameter's gradient that the CPU makes to add it to its bucket in a
        wider element type.
        """
        program, narrow = (
            self._storages.program,
            [value for value in op.outputs if value.name in self._summed],
        )
        wide = ITEM_BYTES[program.params[0].type.dtype]
        sizes = [program.elements(v.type) * wide for v in narrow if ITEM_BYTES[v.type.dtype] < wide]
        return max(sizes, default=0) if self._device == "cpu" else 0

    def _look(self, op: Op, workspace: int) -> None:
        """Notes this moment, in which an op takes `workspace` besides, if memory holds more
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
        self.peaks[self._where] = max(
            self.peaks.get(self._where, moment), moment, key=lambda it: it.bytes
        )

    def _of_others(self) -> int:
        """Bytes that the other layers of the outermost repeat keep."""
        return self._live.get(f"other {self._layers[0][0]}", 0) if self._layers else 0

    def _about(self, op: Op) -> str:
        """A parameter that the op reads, or else what it makes."""
        roots = [self._storages.root(name) for name in op.inputs]
        params = [base(root) for root in roots if root in self._storages.state]
        name = op.inputs[-1] if op.kind in ("pack", "begin") else op.outputs[0].name
        return params[0] if params else base(name).removeprefix("d_").removeprefix("_")

    def _roots(self, names: Iterable[str]) -> list[str]:
        return [*map(self._root, names)]

    def _root(self, name: str) -> str:
        root = self._storages.root(name)
        return self._into.get(root, root)

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self._live.pop(name, None)


def _going(last: Mapping[str, int], stays: Container[str]) -> dict[int, list[str]]:
    """The storages that go after each statement, by the last that needs them; without those
    that stay.
    """
    found: dict[int, list[str]] = {}
    for name, at in last.items():
        if name not in stays:
            found.setdefault(at, []).append(name)
    return found


def _others(region: Region) -> str:
    """The storage of all that the other layers of a repeat keep."""
    return f"other {region.dim}"


def update(storages: Storages) -> PeakSnapshot:
    """The update, and the reduction of gradients before it, with what a run looks at then."""
    return PeakSnapshot(
        None, "update", (), "", 0, 0, 0, _sent(storages) + looks_in_update(storages.program)
    )


def _sent(storages: Storages) -> int:
    """Bytes of the largest gradient that is cast for its reduction; they go one after the other.

    Casts of layers' gradients have gone by then; stages' are counted in the row.
    """
    pipeline = storages.program.pipeline
    stacked = {bucket.dim for bucket in storages.program.buckets if bucket.layers or pipeline}
    casts = [op for op in storages.program.region.body if isinstance(op, Op) and op.kind == "cast"]
    pairs = [(op.inputs[0], op.outputs[0]) for op in casts if not storages.held(op.inputs[0])]
    sizes = (
        (storages.bytes(own), storages.bytes(sent.name))
        for own, sent in pairs
        if not stacked & {*sent.type.dims}
    )
    return max((sent for own, sent in sizes if sent < own), default=0)
