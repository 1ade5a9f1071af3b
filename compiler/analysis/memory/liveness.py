"""Where in a body each storage is needed for the last time.

Non-goals: sizes (`aliasing`), and what is in memory at once (`peak`).
"""

from collections.abc import Container, Iterable, Iterator, Sequence

from attrs import frozen

from ...ir import BATCH, FLOATS, Leave, Op, Region, Stmt, results, walk
from ...ops import VJPS
from ...ops.experts import EXCHANGE_BACK, GROUPED, WAIT, begins, is_of_weights, regroups
from ...ops.fused_loss import LINEAR_CROSS_ENTROPY
from .aliasing import Storages, carried
from .saved_activations import Keeper, bound


def reads(stmt: Stmt) -> Iterator[str]:
    """The values that a statement reads, at any depth; what backward is to read is no reading
    of forward's.
    """
    if isinstance(stmt, Op):
        yield from stmt.inputs
        return
    yield from (arg.source for arg in stmt.args)
    for inner in stmt.body:
        yield from reads(inner)


def last_reads(body: Sequence[Stmt], storages: Storages, args: Iterable[str]) -> dict[str, int]:
    """The statement after which nothing reads a storage, of those that `body` makes or is
    handed as `args`.
    """
    last = dict.fromkeys(args, 0)
    for i, stmt in enumerate(body):
        last |= {
            storages.root(value.name): i for value in results(stmt) if not storages.held(value.name)
        }
        last |= {root: i for name in reads(stmt) if (root := storages.root(name)) in last}
    for root, i in _under_way(body, storages).items():
        last |= {root: max(i, last[root])} if root in last else {}
    return last


def _under_way(body: Sequence[Stmt], storages: Storages) -> dict[str, int]:
    """The statement that last needs rows that an exchange begins to send.

    That is the wait for it, unless a copy is sent; autograd has them until gradients of weights
    beside it are made.
    """
    ops = [(i, stmt) for i, stmt in enumerate(body) if isinstance(stmt, Op)]
    found: dict[str, int] = {}
    for at, op in ops:
        if begins(op):
            is_copied = op.kind == EXCHANGE_BACK.name and regroups(storages.program, op)
            waits = [
                i for i, it in ops if it.kind == WAIT.name and it.inputs == (op.outputs[0].name,)
            ]
            found[storages.root(op.inputs[0])] = max(
                [at, *weights_beside(op, body), *(() if is_copied else waits)]
            )
    return found


def weights_beside(exchange: Op, body: Sequence[Stmt]) -> list[int]:
    """The statements that make gradients of experts' weights while a begun exchange brings back
    gradients of rows.
    """
    if exchange.kind != EXCHANGE_BACK.name or not begins(exchange):
        return []
    after = body.index(exchange) + 1
    ops = ((i, it) for i, it in enumerate(body[after:], after) if isinstance(it, Op))
    return [i for i, it in ops if is_of_weights(it) and it.inputs[-1] == exchange.inputs[1]]


def unkept(
    body: Sequence[Stmt], forward: Sequence[Stmt], storages: Storages, keeper: Keeper
) -> dict[str, int]:
    """The statement that last makes more of what backward's `body` recomputes and no op of
    `forward` keeps.

    Backward's own ops read it in the IR; autograd has a copy of it in another element type.
    """
    kept = {storages.root(name) for op in walk(forward) for name in keeper.values(op)}
    last: dict[str, int] = {}
    for i, stmt in enumerate(body):
        if isinstance(stmt, Op) and stmt.outputs and stmt.outputs[0].name in storages.recomputed:
            around = map(storages.root, (*stmt.inputs, *(value.name for value in stmt.outputs)))
            last |= {root: i for root in around if root in storages.recomputed}
    return {root: i for root, i in last.items() if storages.origin(root) not in kept}


@frozen
class Sums:
    """How the parts of gradients add up as they come: each sum in the first part's memory, into
    which others go.

    into   a sum → its first part
    added  parts that are gone as soon as they are made
    """

    into: dict[str, str]
    added: frozenset[str]


def sums(body: Sequence[Stmt], storages: Storages, last: dict[str, int]) -> Sums:
    """The sums of `body`; in `last`, a first part's life becomes that of the sum."""
    order = {name: i for i, name in enumerate(last)}
    into: dict[str, str] = {}
    added: set[str] = set()
    for i, stmt in enumerate(body):
        if isinstance(stmt, Region) or stmt.kind != "add":
            continue
        (total,), names = (
            (value.name for value in stmt.outputs),
            {storages.root(name) for name in stmt.inputs},
        )
        parts = sorted(
            (into.get(name, name) for name in names), key=lambda name: order.get(name, -1)
        )
        if last.get(parts[0]) == i:
            into[total], last[parts[0]] = parts[0], last[total]
            added |= {part for part in parts[1:] if last.get(part) == i}
    return Sums(into, frozenset(added))


def summed(storages: Storages) -> set[str]:
    """The gradients of parameters: these add up in memory of their bucket as soon as they are
    made.
    """
    found = {end.name for end in storages.program.microbatches.yields if end.leave is Leave.SUM}
    todo = list(storages.program.backward.body)
    while todo:
        stmt = todo.pop()
        if isinstance(stmt, Op):
            found |= {*stmt.inputs} if moves(stmt, found, storages) else set()
            continue
        pairs = zip(stmt.yields, stmt.results, strict=True)
        found |= {
            end.name for end, value in pairs if end.leave is Leave.STACK and value.name in found
        }
        todo += stmt.body
    return found


def moves(op: Op, summed: Container[str], storages: Storages) -> bool:
    """Whether an op only leads a parameter's gradient to its sum: that is in the bucket's
    memory, wherever it goes.
    """
    if not op.outputs or op.outputs[0].name not in summed:
        return op.kind == "begin"
    return op.kind in ("cast", "pack") or (
        op.kind == "coerce" and storages.is_flat(op.outputs[0].name)
    )


@frozen
class _Reader:
    """An op of backward: its place, and the storages of forward that it reads.

    of_weights  whether it makes gradients of experts' weights
    """

    place: int
    origins: set[str]
    of_weights: bool


class Releases:
    """When backward frees what forward kept: an op's tensors after the last op that its
    backward consists of.
    """

    def __init__(self, storages: Storages, keeper: Keeper) -> None:
        self._storages, self._keeper = storages, keeper

    def of(self, backward: Sequence[Stmt], forward: Sequence[Stmt]) -> dict[str, int]:
        """The statement of `backward` after which it is gone, for each storage that statements
        of `forward` keep.
        """
        found: dict[str, int] = {}
        readers = self._readers(backward)
        last = len(backward) - 1
        for stmt in forward:
            after, keys = (
                self._region(stmt, backward)
                if isinstance(stmt, Region)
                else self._op(stmt, readers, last)
            )
            for key in keys:
                found[key] = max(found.get(key, 0), after)
        return found

    def _readers(self, backward: Sequence[Stmt]) -> dict[tuple[str, int], list[_Reader]]:
        """Backward's ops by their line of the plan."""
        found: dict[tuple[str, int], list[_Reader]] = {}
        for place, stmt in enumerate(backward):
            if isinstance(stmt, Op):
                origins = {*map(self._storages.origin, stmt.inputs)}
                found.setdefault(_line(stmt), []).append(
                    _Reader(place, origins, is_of_weights(stmt))
                )
        return found

    def _op(
        self, op: Op, readers: dict[tuple[str, int], list[_Reader]], last: int
    ) -> tuple[int, Iterable[str]]:
        around = [*op.inputs, *(value.name for value in op.outputs)]
        types, program = self._storages.types, self._storages.program
        orders = [
            it for it in around if types[it].dtype not in FLOATS and program.experts_of(types[it])
        ]
        own = [name for name in around if name not in orders]  # which all ops of a route read
        of_line = readers.get(_line(op), [])
        mine = self._reading(own, op, of_line) or self._reading(around, op, of_line)
        second = self._storages.second
        recomputed = {second[name] for name in self._keeper.values(op) if name in second}
        return max(mine, default=last), {
            *self._keeper.saved(op),
            *self._keeper.others(op),
            *recomputed,
        }

    def _reading(self, names: Iterable[str], op: Op, of_line: Iterable[_Reader]) -> list[int]:
        """The places of the ops of an op's line of the plan that read any of these values in
        backward.
        """
        roots = {*map(self._storages.root, names)}
        if op.kind != GROUPED.name:  # of another op's weights, made late
            of_line = (reader for reader in of_line if not reader.of_weights)
        return [reader.place for reader in of_line if roots & reader.origins]

    def _region(self, region: Region, backward: Sequence[Stmt]) -> tuple[int, Iterable[str]]:
        """Bytes that a repeat keeps of its surroundings."""
        around = {arg.value.name: self._storages.root(arg.source) for arg in region.args}
        around |= {self._storages.root(end): result for _, end, result in carried(region)}
        inner = self._keeper.layers[region.results[0].name].found
        own = {*bound(inner, region)} - {*around}
        keys = [around.get(key, key) for key in inner if key not in own]
        mine = [
            i
            for i, it in enumerate(backward)
            if isinstance(it, Region) and mirrors(it, region, self._storages)
        ]
        return max(mine, default=len(backward) - 1), keys


def _line(op: Op) -> tuple[str, int]:
    """An op's place as IR text tells it too."""
    return op.span.path, op.span.line


def mirrors(backward: Region, forward: Region, storages: Storages) -> bool:
    """Whether a repeat of backward reads what a repeat of forward made."""
    return bool(bound((storages.root(arg.source) for arg in backward.args), forward))


def put_off(storages: Storages, body: Iterable[Stmt], layers: int = 1) -> dict[str, int]:
    """Operands of the products that make weights' gradients, each storage once, as all layers
    of repeats keep them.
    """
    found: dict[str, int] = {}
    for stmt in body:
        if isinstance(stmt, Region):
            found |= put_off(storages, stmt.body, layers * storages.program.size(stmt.dim))
        elif is_put_off(stmt):
            # made by forward, and only to be scaled
            given = dict(stmt.attrs).get("of") == LINEAR_CROSS_ENTROPY.name
            read = [value.name for value in stmt.outputs] if given else stmt.inputs
            names = [name for name in read if not storages.held(name)]
            found |= {storages.root(name): layers * storages.bytes(name) for name in names}
    return found


def is_put_off(stmt: Stmt) -> bool:
    """Whether an op makes a weight's gradient in the part of backward for which no other stage
    waits.
    """
    if isinstance(stmt, Region):
        return False
    return (
        VJPS.delayed(stmt)
        or is_of_weights(stmt)
        or (stmt.kind == "contract" and BATCH in stmt.names("over"))
    )
