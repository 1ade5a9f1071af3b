"""The step op by op: what is in memory at each, and when most is.

Forward is walked in the last turn of each repeat, when it has kept most, and backward in the first that it does; so 126
layers cost what 2 do.  Gradients of parameters add up in the state's buckets as they come, parts of another gradient in
the first of them, as autograd does it.  Non-goals: what an allocator loses, and what kernels hold besides `scratch`.
"""

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from ..ir import Enter, Leave, Op, Region, Stmt, base
from ..ops import OPS
from ..ops.saved import Device, Local
from .kept import Keeper, Kept, Turn, bound
from .lifetimes import Releases, last_reads, mirrors, results, summed, sums
from .storages import Storages, carried


@frozen
class Moment:
    """A moment of the step, and what is in memory then beside what always is.

    op     that runs; None for the update, which needs nothing of its own
    turns  of the repeats around it, each with its number of turns: this is the last
    name   the parameter or value that it is about, in backward that of which it is the gradient
    kept   bytes that forward keeps for backward
    other  bytes of values that are on their way, and of gradients
    """

    op: Op | None
    where: str
    turns: tuple[tuple[str, int], ...]
    name: str
    kept: int
    other: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.kept + self.other


class Walk:
    """Walks one microbatch; `peak` is the moment when most is in memory."""

    def __init__(self, storages: Storages, keeper: Keeper, device: Device) -> None:
        self._storages, self._keeper = storages, keeper
        self._device: Device = device
        self._releases, self._summed = Releases(storages, keeper), summed(storages)
        self._live: dict[str, int] = {}
        self._kept: set[str] = set()
        self._into: dict[str, str] = {}
        self._where, self._turns = "forward", list[tuple[str, int]]()
        self.peak = Moment(None, "update", (), "", 0, 0)
        self._forward(storages.forward.body, None, keeper.all)
        self._where = "backward"
        self._backward(storages.backward.body, storages.forward.body)

    # ---- forward

    def _forward(self, body: Sequence[Stmt], region: Region | None, kept: Mapping[str, Kept]) -> None:
        """Walks a body; what it keeps, and what it hands on, is then still there."""
        args, ends = self._handed(region)
        stays = {*kept, *ends, *(self._linked(region, kept) if region else ())}
        self._kept |= stays - ends
        last = last_reads(body, self._storages, args)
        for i, stmt in enumerate(body):
            gone = [name for name, at in last.items() if at == i and name not in stays]
            if isinstance(stmt, Region):
                self._forward_turn(stmt, gone, kept)
            else:
                self._run(stmt, {key: it.bytes for key, it in self._keeper.saved(stmt).items() if ":" in key})
            self._free(gone)

    def _forward_turn(self, region: Region, gone: Sequence[str], kept: Mapping[str, Kept]) -> None:
        """The last turn of a repeat, in place of all."""
        turn = self._keeper.turns[region.results[0].name]
        self._enter(region, turn, gone)
        self._forward(region.body, region, turn.found)
        self._leave(region)
        self._live |= {key: kept[key].total for key in bound(kept, region)}
        self._kept |= {*kept}

    def _linked(self, region: Region, found: Mapping[str, Kept]) -> list[str]:
        """What a turn is handed that is kept, because this turn keeps it or the one before does."""
        return [arg for arg, end, _ in carried(region) if arg in found or self._storages.root(end) in found]

    # ---- backward

    def _backward(self, body: Sequence[Stmt], forward: Sequence[Stmt], region: Region | None = None) -> None:
        """Walks a body that is the backward of the body `forward`."""
        args, ends = self._handed(region)
        last = last_reads(body, self._storages, args)
        found = sums(body, self._storages, last)
        self._into |= found.into
        ends = {self._root(end) for end in ends}
        last |= {name: max(at, last.get(name, 0)) for name, at in self._releases.of(body, forward).items()}
        for i, stmt in enumerate(body):
            gone = [name for name, at in last.items() if at == i and name not in ends]
            if isinstance(stmt, Region):
                self._backward_turn(stmt, gone, forward)
            elif stmt.kind != "cast" or stmt.outputs[0].name not in self._summed:
                first = self._storages.again.get(stmt.outputs[0].name)
                self._run(stmt, self._keeper.others(first) if first else {})
            self._free(gone)
            self._free(v.name for v in results(stmt) if v.name in self._summed or v.name in found.added)

    def _backward_turn(self, region: Region, gone: Sequence[str], forward: Sequence[Stmt]) -> None:
        """The first turn of a repeat's backward, that of forward's last turn, in place of all."""
        repeats = (it for it in forward if isinstance(it, Region))
        mirror = next((it for it in repeats if mirrors(region, it, self._storages)), None)
        if mirror is None:
            self._enter(region, Turn({}, 0, 0), gone)
            self._backward(region.body, (), region)
        else:
            turn = self._keeper.turns[mirror.results[0].name]
            self._free(bound(self._live, mirror))
            self._enter(region, turn, gone)
            self._live |= self._last_turn(mirror, turn)
            self._backward(region.body, mirror.body, region)
            self._free(bound(self._live, mirror))
        self._leave(region)

    def _last_turn(self, region: Region, turn: Turn) -> dict[str, int]:
        """What the last turn of a repeat kept, but for what it handed on: that is the repeat's result."""
        args, ends = self._handed(region)
        found = {key: turn.found[key].total for key in bound(turn.found, region) if key not in ends}
        found |= {arg: self._storages.bytes(arg) for arg in self._linked(region, turn.found)}
        alone = self._storages.program.size(region.dim) > 1
        return {key: size for key, size in found.items() if alone or key not in args}

    # ---- repeats

    def _handed(self, region: Region | None) -> tuple[set[str], set[str]]:
        """What a turn of a repeat is handed, and what it hands on."""
        links = carried(region) if region else []
        return {arg for arg, _, _ in links}, {self._storages.root(end) for _, end, _ in links}

    def _enter(self, region: Region, turn: Turn, gone: Iterable[str]) -> None:
        """What the other turns keep, and what this one is handed; `gone` is what nothing needs after it."""
        turns = self._storages.program.size(region.dim)
        self._turns.append((region.dim, turns))
        self._live[_others(region)] = max(turns - 1, 0) * turn.own + max(turns - 2, 0) * turn.chain
        self._kept.add(_others(region))
        self._free(gone)
        for arg in region.args:
            if arg.enter is Enter.CARRY:
                alone = turns > 1 or self._root(arg.source) not in self._live
                self._live[arg.value.name] = self._storages.bytes(arg.value.name) if alone else 0

    def _leave(self, region: Region) -> None:
        """Of a turn only what it hands on is left."""
        self._turns.pop()
        self._free([_others(region), *bound(self._live, region)])
        for end, value in zip(region.yields, region.results, strict=True):
            if end.leave is Leave.LAST and self._root(value.name) == value.name and value.name not in self._summed:
                self._live[value.name] = self._storages.bytes(value.name)

    # ---- ops

    def _run(self, op: Op, others: Mapping[str, int]) -> None:
        """Makes an op's results, and what else it keeps."""
        for value in op.outputs:
            root = self._root(value.name)
            if root not in self._live and not self._storages.held(root):
                self._live[root] = self._storages.bytes(value.name)
        self._live |= others
        self._look(op)

    def _look(self, op: Op) -> None:
        """Takes note of this moment if more is in memory than ever before."""
        types = tuple(self._storages.types[name] for name in op.inputs)
        local = Local(self._storages.program, op, types, (True,) * len(types), self._device)
        kept = sum(size for key, size in self._live.items() if key in self._kept)
        other = sum(self._live.values()) - kept + OPS[op.kind].scratch(local)
        if kept + other > self.peak.bytes:
            self.peak = Moment(op, self._where, tuple(self._turns), self._about(op), kept, other)

    def _about(self, op: Op) -> str:
        """A parameter that the op reads, or else what it makes."""
        roots = [self._storages.root(name) for name in op.inputs]
        params = [base(root) for root in roots if root in self._storages.state]
        return params[0] if params else base(op.outputs[0].name).removeprefix("d_").removeprefix("_")

    def _root(self, name: str) -> str:
        root = self._storages.root(name)
        return self._into.get(root, root)

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self._live.pop(name, None)


def _others(region: Region) -> str:
    """What the other turns of a repeat keep, as a storage."""
    return f"other {region.dim}"
