"""The activations of one microbatch that autograd saves from forward to backward, each storage
once.

Purpose: the tensors by op and plan line; the tensors of a repeat are found in one layer and counted
for all.  Non-goals: when they are freed (`liveness`).
"""

from collections.abc import Iterable, Iterator

from attrs import evolve, frozen

from ...ir import Op, Region, Stmt, results
from ...ops import OPS
from ...ops.saved_tensors import Device, Local, Saved
from ..recompute import is_recomputed, recomputes_layers, recomputes_region
from ..stage_program import RECEIVED
from .aliasing import Storages, get_carried_values


@frozen
class Kept:
    """A tensor that autograd keeps for backward.

    op     the first op that keeps it
    what   the value that it is, or what it holds
    layers  how many such tensors a microbatch keeps; of a repeat's layer, how many one layer keeps
    """

    op: Op
    what: str
    bytes: int
    layers: int = 1

    @property
    def total(self) -> int:
        """The bytes of all of them."""
        return self.bytes * self.layers


@frozen
class SavedByLayer:
    """The saved activations of one layer of a repeat.

    found  by storage, as the body keeps it, with what it keeps of its surroundings
    own    bytes that every layer keeps
    chain  bytes of what a layer is handed by another, if it keeps that
    every  one layer in every `every` is recomputed and saves `own` bytes; the others save `other`
           bytes
    links  one layer in every `links` keeps `chain`
    start  how many layers other stages do before
    """

    kept_by_storage: dict[str, Kept]
    layer_bytes: int
    chain: int
    every: int = 1
    other: int = 0
    links: int = 1
    start: int = 0

    def first(self, layers: int) -> int:
        """The bytes that the first `layers` layers save."""
        recomputed = multiples(self.every, self.start, self.start + layers)
        return (
            recomputed * self.layer_bytes
            + (layers - recomputed) * self.other
            + self.count_links(layers) * self.chain
        )

    def count_links(self, layers: int) -> int:
        """How many of the first `layers` layers keep what another hands them."""
        return multiples(self.links, self.start + 1, self.start + max(layers, 1))


def multiples(every: int, start: int, stop: int) -> int:
    """How many multiples of `every` there are from `start` to before `stop`."""
    return -(-stop // every) - -(-start // every)


class Keeper:
    """Saved activations: `all` of a microbatch, and of one layer of each repeat, by the name of
    its first result.
    """

    def __init__(self, storages: Storages, device: Device) -> None:
        self._storages = storages
        self._device: Device = device
        weights = storages.state | storages.gathered
        self._wanted = {name for name in storages.types if storages.root(name) in weights}
        self._wanted.update(storages.received)
        self.layers: dict[str, SavedByLayer] = {}
        self._decisions: dict[str, Saved] = {}  # by first result, in layers that are recomputed
        # results of `saved`, by first result of the op
        self._known: dict[str, dict[str, Kept]] = {}
        self._by_layer = True  # whether what backward recomputes layer by layer is not kept
        # results of `_get_sources`, by `_by_layer` too
        self._sources: dict[tuple[str, bool], list[str]] = {}
        self.all = self._body(storages.program.forward.body)

    def _body(self, body: tuple[Stmt, ...]) -> dict[str, Kept]:
        kept_by_storage: dict[str, Kept] = {}
        for stmt in body:
            if isinstance(stmt, Region):
                self._repeat(stmt, kept_by_storage)
                continue
            # a result has a gradient if an operand has one, and it is a number that the op has a
            # gradient of
            wanted = any(name in self._wanted for name in stmt.inputs)
            if wanted and (OPS[stmt.kind].differentiable or stmt.kind in ("coerce", "cast")):
                self._wanted |= {value.name for value in stmt.outputs if value.type.differentiable}
            for key, kept in self._find_saved_tensors(stmt).items():
                kept_by_storage.setdefault(key, kept)
        return kept_by_storage

    def get_saved_tensors(self, op: Op) -> dict[str, Kept]:
        """The tensors that an op of forward saves, by storage; one that is no value of the IR
        has a name of its own.
        """
        name = op.outputs[0].name
        if name not in self._known:
            self._known[name] = self._find_saved_tensors(op)
        return self._known[name]

    def _find_saved_tensors(self, op: Op) -> dict[str, Kept]:
        storages = self._storages
        first_result = op.outputs[0].name
        recomputed = self._is_recomputed_from(first_result) or is_recomputed(storages.program, op)
        if self._by_layer and first_result in self._decisions:
            saved = self._decisions[first_result]
        elif recomputed:
            saved = Saved(operands=tuple(range(len(op.inputs))))
        else:
            saved = self._by_itself(op)
        roots: dict[str, None] = {}
        for value in _values(op, saved):
            for source in self._get_sources(value):
                roots[storages.root(source)] = None
        kept: dict[str, Kept] = {}
        for root in roots:
            if not storages.is_permanent(root):
                kept[root] = Kept(op, root.split(RECEIVED)[0], storages.bytes(root))
        for what, size in saved.others:
            kept[f"{first_result}: {what}"] = Kept(op, what, size)
        return kept

    def values(self, op: Op) -> list[str]:
        """The values that an op keeps, wherever it is done."""
        return _values(op, self._by_itself(op))

    def others(self, op: Op) -> dict[str, int]:
        """Bytes that an op keeps besides operands and results, wherever it is done, by the names
        that `saved` has for them.
        """
        return {f"{op.outputs[0].name}: {what}": size for what, size in self._by_itself(op).others}

    def _by_itself(self, op: Op) -> Saved:
        """The tensors that an op saves if it is not recomputed."""
        local = self._local(op)
        if not any(local.wanted):
            return Saved()
        return OPS[op.kind].get_saved_tensors(local)

    def _local(self, op: Op) -> Local:
        types = tuple(self._storages.types[name] for name in op.inputs)
        wanted = tuple(name in self._wanted for name in op.inputs)
        return Local(self._storages.program, op, types, wanted, self._device)

    def _get_sources(self, name: str) -> list[str]:
        """A value, or its operands where backward recomputes it; nothing of a decision that
        keeps another tensor.
        """
        key = name, self._by_layer
        if key not in self._sources:
            self._sources[key] = self._find_sources(name)
        return self._sources[key]

    def _find_sources(self, name: str) -> list[str]:
        if self._is_recomputed_from(name):
            sources: dict[str, None] = {}
            for operand in self._storages.recomputed_from[name]:
                sources |= dict.fromkeys(self._get_sources(operand))
            return [*sources]
        decision = self._decisions.get(name) if self._by_layer else None
        if decision and not decision.results:
            return []
        return [name]

    def _is_recomputed_from(self, name: str) -> bool:
        return name in self._storages.recomputed_from and (
            self._by_layer or name not in self._storages.sometimes
        )

    def _repeat(self, region: Region, kept_by_storage: dict[str, Kept]) -> None:
        """Adds what all layers of a repeat keep.

        A layer receives the result of the one before.  So the layers keep the source, the results
        of all but the last, and the result.
        """
        storages, layers = self._storages, self._storages.program.size(region.dim)
        self._wanted |= {arg.value.name for arg in region.args if arg.value.type.differentiable}
        self._wanted |= {result.name for result in region.results if result.type.differentiable}
        if recomputes_region(storages.program, region):
            self._decide(region)
        inner = self._body(region.body)
        chains = self._chains(region, inner, kept_by_storage)
        handed = {arg for arg, _, _ in get_carried_values(region)} | {*chains}
        every = max(recomputes_layers(storages.program, region.dim), 1)
        whole = inner
        if every > 1:  # what layers that are not recomputed keep
            self._by_layer = False
            whole = self._body(region.body)
            self._by_layer = True
        in_recomputed = {
            key: inner[key] for key in find_bound_storages(inner, region) if key not in handed
        }
        in_others = {
            key: whole[key] for key in find_bound_storages(whole, region) if key not in handed
        }
        start = storages.layers.get(region.dim, range(0)).start
        layer = SavedByLayer(
            inner,
            layer_bytes=_total(in_recomputed),
            chain=_total(chains),
            every=every,
            other=_total(in_others),
            links=1 if whole.keys() & handed else every,
            start=start,
        )
        self.layers[region.results[0].name] = layer
        for key, kept in inner.items():
            if key not in in_recomputed and key not in handed:
                kept_by_storage.setdefault(key, kept)
        recomputed = multiples(every, start, start + layers)
        for key, kept in (in_recomputed | in_others).items():
            count = recomputed * (key in in_recomputed) + (layers - recomputed) * (key in in_others)
            kept_by_storage[key] = evolve(kept, layers=kept.layers * count)
        chain_links = layer.count_links(layers)
        if chain_links:
            for key, kept in chains.items():
                kept_by_storage[key] = evolve(kept, layers=chain_links)

    def _decide(self, region: Region) -> None:
        """Takes note of the tensors that decisions of a recomputed layer keep."""
        for op in region.body:
            if isinstance(op, Op) and OPS[op.kind].decides:
                self._decisions[op.outputs[0].name] = OPS[op.kind].decision(self._local(op))
        self._sources.clear()  # nothing of a decision may be kept now

    def _chains(
        self, region: Region, inner: dict[str, Kept], kept_by_storage: dict[str, Kept]
    ) -> dict[str, Kept]:
        """By its end, each tensor that a layer hands to the next and that one of them keeps.

        Tensors that enter the first layer, and that leave the last, are added to `kept_by_storage`.
        """
        sources = {arg.value.name: self._storages.root(arg.source) for arg in region.args}
        chains: dict[str, Kept] = {}
        for arg, end, result in get_carried_values(region):
            root = self._storages.root(end)
            if arg in inner:
                source = evolve(inner[arg], what=sources[arg], layers=1)
                kept_by_storage.setdefault(sources[arg], source)
            if root == arg:
                continue
            if root in inner:
                kept_by_storage.setdefault(result, evolve(inner[root], what=result, layers=1))
            if first := inner.get(arg) or inner.get(root):
                chains[root] = evolve(first, what=root, layers=1)
        return chains


def _total(tensors: dict[str, Kept]) -> int:
    return sum(kept.total for kept in tensors.values())


def find_bound_storages(storages: Iterable[str], region: Region) -> list[str]:
    """The given storages that a region's body makes or is handed, at any depth."""
    inside = {*_names_inside(region)}
    return [name for name in storages if name.split(":")[0] in inside]


def _names_inside(region: Region) -> Iterator[str]:
    for arg, _, _ in get_carried_values(region):
        yield arg
    for stmt in region.body:
        for value in results(stmt):
            yield value.name
        if isinstance(stmt, Region):
            yield from _names_inside(stmt)


def _values(op: Op, saved: Saved) -> list[str]:
    operands = [op.inputs[i] for i in saved.operands]
    return operands + [op.outputs[i].name for i in saved.results]
