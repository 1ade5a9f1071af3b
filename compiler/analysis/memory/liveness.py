"""Where in a body each storage is needed for the last time.

Non-goals: sizes (`aliasing`), and what is in memory at once (`peak`).
"""

from collections.abc import Container, Iterable, Iterator, Sequence

from attrs import frozen

from ...ir import FLOATS, Leave, Op, Region, Stmt, results, walk
from ...ops import OPS, VJPS, makes_late_weights
from ...ops.protocol import begins
from .aliasing import Storages, get_carried_values
from .saved_activations import Keeper, find_bound_storages


def reads(stmt: Stmt) -> Iterator[str]:
    """The values that a statement reads, at any depth.

    A value of forward that only backward reads is not read by forward's repeat that yields it.
    """
    if isinstance(stmt, Op):
        yield from stmt.inputs
        return
    for arg in stmt.args:
        yield arg.source
    for inner in stmt.body:
        yield from reads(inner)


def last_reads(body: Sequence[Stmt], storages: Storages, args: Iterable[str]) -> dict[str, int]:
    """By storage the place of the last statement that reads it, for the storages that `body` makes
    or is handed as `args`.
    """
    last = dict.fromkeys(args, 0)
    for i, stmt in enumerate(body):
        for value in results(stmt):
            if not storages.is_permanent(value.name):
                last[storages.root(value.name)] = i
        for name in reads(stmt):
            root = storages.root(name)
            if root in last:
                last[root] = i
    for root, i in _under_way(body, storages).items():
        if root in last:
            last[root] = max(i, last[root])
    return last


def _under_way(body: Sequence[Stmt], storages: Storages) -> dict[str, int]:
    """By storage the place of the statement that last needs what an exchange begins to send.

    It is the wait for the exchange, unless a copy is sent; autograd has the storage until gradients
    of weights beside it are made.
    """
    waits_by_exchange: dict[tuple[str, ...], list[int]] = {}
    for place, op in enumerate(body):
        if isinstance(op, Op) and OPS[op.kind].awaits:
            waits_by_exchange.setdefault(op.inputs, []).append(place)
    last: dict[str, int] = {}
    for place, op in enumerate(body):
        if not isinstance(op, Op) or not begins(op):
            continue
        places = [place, *weights_beside(op, body)]
        if not OPS[op.kind].copies_sent(storages.program, op):
            places += waits_by_exchange.get((op.outputs[0].name,), [])
        last[storages.root(op.inputs[0])] = max(places)
    return last


def weights_beside(exchange: Op, body: Sequence[Stmt]) -> list[int]:
    """The places of the statements that make gradients of weights while a begun exchange brings
    back gradients of inputs.

    They share an operand with the exchange: which rows there are.
    """
    if not begins(exchange):
        return []
    after = body.index(exchange) + 1
    places = list[int]()
    for place, op in enumerate(body[after:], after):
        if isinstance(op, Region):
            continue
        if OPS[op.kind].awaits and op.inputs[0] == exchange.outputs[0].name:
            break
        if makes_late_weights(op) and not {*op.inputs}.isdisjoint(exchange.inputs):
            places.append(place)
    return places


def unkept(
    body: Sequence[Stmt], forward: Sequence[Stmt], storages: Storages, keeper: Keeper
) -> dict[str, int]:
    """By storage that backward's `body` recomputes, and no op of `forward` keeps, the place of the
    last recomputing statement that reads or makes it.

    Backward's own ops read it in the IR; autograd has a copy of it in another element type.
    """
    kept = set[str]()
    for op in walk(forward):
        kept.update(map(storages.root, keeper.values(op)))
    last: dict[str, int] = {}
    for i, stmt in enumerate(body):
        if isinstance(stmt, Op) and stmt.outputs and stmt.outputs[0].name in storages.recomputed:
            names = (*stmt.inputs, *(value.name for value in stmt.outputs))
            for root in map(storages.root, names):
                if root in storages.recomputed:
                    last[root] = i
    return {root: i for root, i in last.items() if storages.origin(root) not in kept}


@frozen
class Sums:
    """How the parts of gradients add up as they come: each sum lies in the first part's memory, and
    the other parts are added to it.

    into   a sum → its first part
    added  parts that are gone as soon as they are made
    """

    into: dict[str, str]
    added: frozenset[str]


def sums(body: Sequence[Stmt], storages: Storages, last: dict[str, int]) -> Sums:
    """The sums of `body`; in `last`, the life of a first part becomes the life of the sum."""
    order = {name: i for i, name in enumerate(last)}
    into: dict[str, str] = {}
    added: set[str] = set()
    for i, stmt in enumerate(body):
        if isinstance(stmt, Region) or stmt.kind != "add":
            continue
        (total,) = stmt.outputs
        names = {storages.root(name) for name in stmt.inputs}
        roots = (into.get(name, name) for name in names)
        first, *others = sorted(roots, key=lambda name: order.get(name, -1))
        if last.get(first) == i:
            into[total.name], last[first] = first, last[total.name]
            added |= {part for part in others if last.get(part) == i}
    return Sums(into, frozenset(added))


def find_summed_gradients(storages: Storages) -> set[str]:
    """The gradients of parameters: these add up in memory of their bucket as soon as they are
    made.
    """
    ends = storages.program.microbatches.yields
    gradients = {end.name for end in ends if end.leave is Leave.SUM}
    todo = list(storages.program.backward.body)
    while todo:
        stmt = todo.pop()
        if isinstance(stmt, Op):
            if moves(stmt, gradients, storages):
                gradients |= {*stmt.inputs}
            continue
        for end, value in zip(stmt.yields, stmt.results, strict=True):
            if end.leave is Leave.STACK and value.name in gradients:
                gradients.add(end.name)
        todo += stmt.body
    return gradients


def moves(op: Op, summed: Container[str], storages: Storages) -> bool:
    """Whether an op only leads a parameter's gradient to its sum, which lies in the bucket's
    memory all the way.
    """
    if not op.outputs or op.outputs[0].name not in summed:
        return op.kind == "begin"
    if op.kind == "coerce":
        return storages.is_flat(op.outputs[0].name)
    return op.kind in ("cast", "pack")


@frozen
class _Reader:
    """An op of backward: its place, and the storages of forward that it reads.

    late_kind  the kind of an op that makes gradients of weights late; "" for any other
    """

    place: int
    origins: set[str]
    late_kind: str


class Releases:
    """When backward frees what forward kept: an op's tensors go after its backward's last op."""

    def __init__(self, storages: Storages, keeper: Keeper) -> None:
        self._storages, self._keeper = storages, keeper

    def get_last_places(self, backward: Sequence[Stmt], forward: Sequence[Stmt]) -> dict[str, int]:
        """By storage that statements of `forward` keep, the place of the statement of `backward`
        that needs it last.
        """
        last: dict[str, int] = {}
        readers = self._readers(backward)
        for stmt in forward:
            if isinstance(stmt, Region):
                place, keys = self._region(stmt, backward)
            else:
                place, keys = self._op(stmt, readers, len(backward) - 1)
            for key in keys:
                last[key] = max(last.get(key, 0), place)
        return last

    def _readers(self, backward: Sequence[Stmt]) -> dict[tuple[str, int], list[_Reader]]:
        """Backward's ops by their line of the plan."""
        readers: dict[tuple[str, int], list[_Reader]] = {}
        for place, stmt in enumerate(backward):
            if isinstance(stmt, Op):
                origins = {*map(self._storages.origin, stmt.inputs)}
                late_kind = stmt.kind if makes_late_weights(stmt) else ""
                reader = _Reader(place, origins, late_kind)
                readers.setdefault(_line(stmt), []).append(reader)
        return readers

    def _op(
        self, op: Op, readers: dict[tuple[str, int], list[_Reader]], last: int
    ) -> tuple[int, Iterable[str]]:
        """The place of the last op of an op's backward, `last` if none is found, and the storages
        that the op keeps.
        """
        types, program = self._storages.types, self._storages.program
        names = [*op.inputs, *(value.name for value in op.outputs)]
        own_names = list[str]()
        for name in names:
            # all ops of a route read its orders
            is_order = types[name].dtype not in FLOATS and program.experts_of(types[name])
            if not is_order:
                own_names.append(name)
        of_line = readers.get(_line(op), [])
        places = self._reading(own_names, op, of_line) or self._reading(names, op, of_line)
        second = self._storages.second
        recomputed = {second[name] for name in self._keeper.values(op) if name in second}
        keys = {*self._keeper.get_saved_tensors(op), *self._keeper.others(op), *recomputed}
        return max(places, default=last), keys

    def _reading(self, names: Iterable[str], op: Op, of_line: Iterable[_Reader]) -> list[int]:
        """The places of the ops of an op's line of the plan that read any of these values in
        backward.
        """
        roots = {*map(self._storages.root, names)}
        places = list[int]()
        for reader in of_line:
            # gradients of another op's weights are made late
            is_of_another = reader.late_kind not in ("", op.kind)
            if not is_of_another and roots & reader.origins:
                places.append(reader.place)
        return places

    def _region(self, region: Region, backward: Sequence[Stmt]) -> tuple[int, Iterable[str]]:
        """The place of a repeat's backward, and the storages of its surroundings that it keeps."""
        around = {arg.value.name: self._storages.root(arg.source) for arg in region.args}
        for _, end, result in get_carried_values(region):
            around[self._storages.root(end)] = result
        inner = self._keeper.layers[region.results[0].name].kept_by_storage
        inside = {*find_bound_storages(inner, region)} - {*around}
        keys = [around.get(key, key) for key in inner if key not in inside]
        last = -1
        for place, stmt in enumerate(backward):
            if isinstance(stmt, Region) and mirrors(stmt, region, self._storages):
                last = place
        if last < 0:
            last = len(backward) - 1
        return last, keys


def _line(op: Op) -> tuple[str, int]:
    """An op's place as IR text tells it too."""
    return op.span.path, op.span.line


def mirrors(backward: Region, forward: Region, storages: Storages) -> bool:
    """Whether a repeat of backward reads what a repeat of forward made."""
    return bool(find_bound_storages((storages.root(arg.source) for arg in backward.args), forward))


def get_put_off_sizes(storages: Storages, body: Iterable[Stmt], layers: int = 1) -> dict[str, int]:
    """Bytes of operands of the products that make weights' gradients, each storage once, as all
    layers of repeats keep them.
    """
    sizes: dict[str, int] = {}
    for stmt in body:
        if isinstance(stmt, Region):
            sizes |= get_put_off_sizes(
                storages, stmt.body, layers * storages.program.size(stmt.dim)
            )
        elif OPS[stmt.kind].may_delay(stmt):
            names = stmt.inputs
            if VJPS.get_gradients_from_forward(stmt):
                # forward has made the gradients, and they are only to be scaled
                names = [value.name for value in stmt.outputs]
            for name in names:
                if not storages.is_permanent(name):
                    sizes[storages.root(name)] = layers * storages.bytes(name)
    return sizes


def is_put_off(stmt: Stmt) -> bool:
    """Whether an op makes a weight's gradient in the part of backward that no other stage waits
    for.
    """
    return isinstance(stmt, Op) and OPS[stmt.kind].may_delay(stmt)
