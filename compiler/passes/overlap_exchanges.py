"""Lets an exchange of experts' rows begin where rows are ready, and waits for it where they are
needed.

Purpose: ops of the same body that neither lead to a route's rows nor need what comes of them, as a
shared expert, run beside its two exchanges: those with the first half of their products beside the
exchange to the experts, the others beside the one back.  In backward, whose order is the reverse,
their gradients run beside the same exchanges, and those of experts' weights beside the one that
brings gradients of rows back to their tokens (`weights_beside`).  Before: `fuse_ops`, so that no op
is split that is done at once; placements and coercions are final.  Non-goals: what backward
recomputes by itself (`selective(dispatch)`); ops of another microbatch.
"""

from collections.abc import Collection, Iterator, Sequence

from attrs import evolve

from ..analysis.flops import cost
from ..analysis.recompute import is_recomputed
from ..ir import Op, Program, Region, Stmt, ancestors, ops_in, results, uses
from ..ops.builder import OpBuilder
from ..ops.experts import ASYNC, EXCHANGE, EXCHANGE_BACK, WAIT, begins, is_of_weights


def overlap_exchanges(program: Program) -> Program:
    """The program with exchanges that begin before they are awaited, where anything runs beside
    them.
    """
    return evolve(program, region=_overlapped(program.region, OpBuilder(program)))


def weights_beside(body: Sequence[Stmt]) -> list[Stmt]:
    """A backward body with gradients of experts' weights beside the exchange of rows' gradients
    that begins next.

    That needs none of them, and nothing else does before it.
    """
    backs = (
        (i, op) for i, op in enumerate(body) if isinstance(op, Op) and op.kind == EXCHANGE_BACK.name
    )
    begun = {op.inputs[1]: i for i, op in backs if begins(op)}
    late: dict[int, list[Stmt]] = {}
    for i, op in enumerate(body):
        if isinstance(op, Op) and is_of_weights(op):
            at = begun.get(op.inputs[-1], 0)
            if at > i and op.outputs[0].name not in uses(*body[i:at]):
                late.setdefault(at, []).append(op)
    moved = [op for ops in late.values() for op in ops]
    return [
        each
        for i, stmt in enumerate(body)
        if stmt not in moved
        for each in (stmt, *late.get(i, ()))
    ]


def _overlapped(region: Region, b: OpBuilder) -> Region:
    body = tuple(_overlapped(stmt, b) if isinstance(stmt, Region) else stmt for stmt in region.body)
    back = {op.inputs[1]: op for op in ops_in(body) if op.kind == EXCHANGE_BACK.name}
    for there in [op for op in ops_in(body) if op.kind == EXCHANGE.name]:
        body = tuple(_beside(there, back[there.inputs[1]], body, b))
    return evolve(region, body=body)


def _beside(there: Op, back: Op, body: Sequence[Stmt], b: OpBuilder) -> Iterator[Stmt]:
    """The body with all that may run beside a route's exchanges to its experts and back."""
    free = _free(there, body)
    first, second = _halves(b.program, free, ancestors(body[: body.index(back)], back.inputs))
    beside = {there: first, back: second}
    if is_recomputed(b.program, there):
        beside = {back: free}
    for stmt in body:
        if stmt in beside and (beside[stmt] or stmt is there):
            yield from _awaited(stmt, beside[stmt], b)
        elif stmt not in free:
            yield stmt


def _awaited(op: Op, beside: Sequence[Op], b: OpBuilder) -> Iterator[Op]:
    """An exchange that begins, what runs beside it, and the wait for it."""
    (came,) = op.outputs
    under_way = b.value(came.name, came.type)
    yield evolve(op, outputs=(under_way,), attrs=(*op.attrs, (ASYNC.name, "on")))
    yield from beside
    yield Op(WAIT.name, (under_way.name,), (came,), span=op.span)


def _free(there: Op, body: Sequence[Stmt]) -> list[Op]:
    """The ops, in their order, that can be done while a route's rows are under way to its
    experts.
    """
    at = body.index(there)
    staying = (value.name for stmt in body[:at] if _stays(stmt) for value in results(stmt))
    needed = ancestors(body[:at], [*there.inputs, *staying])
    late = set[str]()
    found = list[Op]()
    for i, stmt in enumerate(body):
        made = {value.name for value in results(stmt)}
        is_free = (
            needed.isdisjoint(made) if i < at else not _stays(stmt) and late.isdisjoint(uses(stmt))
        )
        late |= made if i >= at and not is_free else set()
        if is_free and isinstance(stmt, Op):
            found.append(stmt)
    return found


def _stays(stmt: Stmt) -> bool:
    """Whether a statement stays where it is: a repeat, a parameter, an exchange."""
    return isinstance(stmt, Region) or stmt.kind in (
        "leaf",
        EXCHANGE.name,
        EXCHANGE_BACK.name,
        WAIT.name,
    )


def _halves(
    program: Program, free: Sequence[Op], needed: Collection[str]
) -> tuple[list[Op], list[Op]]:
    """Two halves: ops that make anything `needed`, and others whose middle is in the first half of
    products; the rest.

    Products are counted, not weighed: which op runs where depends on no sizes then, so that the
    same model at the small sizes of its proof compiles to the same ops.
    """
    counts = [_product_count(program, op) for op in free]
    products, products_before = sum(counts), 0
    first, second = list[Op](), list[Op]()
    for op, count in zip(free, counts, strict=True):
        is_needed = any(value.name in needed for value in op.outputs)
        is_first = is_needed or 2 * products_before + count <= products
        (first if is_first else second).append(op)
        products_before += count
    return first, second


def _product_count(program: Program, op: Op) -> int:
    """One for each result, of an op that does more than one operation for each element that it
    writes; else none.
    """
    elements = sum(program.elements(evolve(value.type, places=())) for value in op.outputs)
    is_product = cost(program, [op]).forward > elements
    return len(op.outputs) if is_product else 0
