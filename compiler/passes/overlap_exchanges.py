"""Lets an exchange of experts' rows begin where rows are ready, and waits for it where they are
needed.

Purpose: ops of the same body that neither lead to a route's rows nor need what comes of them, as a
shared expert, run beside its two exchanges: ops with the first half of their products beside the
exchange to the experts, the others beside the one back.  In backward, whose order is the reverse,
their gradients run beside the same exchanges.  The gradients of experts' weights run beside the
exchange that brings gradients of rows back to their tokens (`weights_beside`).  Before: `fuse_ops`,
so that no op is split that is done at once; placements and coercions are final.  Non-goals: what
backward recomputes by itself (`selective(dispatch)`); ops of another microbatch.
"""

from collections.abc import Collection, Iterator, Sequence

from attrs import evolve

from ..analysis.flops import cost
from ..analysis.recompute import is_recomputed
from ..ir import Op, Program, Region, Stmt, ancestors, ops_in, results, uses
from ..ops import makes_late_weights
from ..ops.builder import OpBuilder
from ..ops.experts import EXCHANGE, EXCHANGE_BACK, WAIT
from ..ops.protocol import ASYNC, begins


def overlap_exchanges(program: Program) -> Program:
    """The program with exchanges that begin before they are awaited, where anything runs beside
    them.
    """
    return evolve(program, region=_overlap_region(program.region, OpBuilder(program)))


def weights_beside(body: Sequence[Stmt]) -> list[Stmt]:
    """A backward body with gradients of experts' weights beside the exchange of rows' gradients
    that begins next.

    That needs none of them, and nothing else does before it.
    """
    # an exchange by the order that its rows and the gradients of weights share
    begun = dict[str, int]()
    for i, op in enumerate(body):
        if isinstance(op, Op) and op.kind == EXCHANGE_BACK.name and begins(op):
            begun[op.inputs[1]] = i
    late: dict[int, list[Stmt]] = {}
    moved = list[Stmt]()
    for i, op in enumerate(body):
        if isinstance(op, Op) and makes_late_weights(op):
            index = begun.get(op.inputs[-1], 0)
            if index > i and op.outputs[0].name not in uses(*body[i:index]):
                late.setdefault(index, []).append(op)
                moved.append(op)
    ordered = list[Stmt]()
    for i, stmt in enumerate(body):
        if stmt not in moved:
            ordered += (stmt, *late.get(i, ()))
    return ordered


def _overlap_region(region: Region, b: OpBuilder) -> Region:
    stmts = list[Stmt]()
    for stmt in region.body:
        stmts.append(_overlap_region(stmt, b) if isinstance(stmt, Region) else stmt)
    body = tuple(stmts)
    ops = ops_in(body)
    back = {op.inputs[1]: op for op in ops if op.kind == EXCHANGE_BACK.name}
    for there in ops:
        if there.kind == EXCHANGE.name:
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
            yield from _begin_and_wait(stmt, beside[stmt], b)
        elif stmt not in free:
            yield stmt


def _begin_and_wait(op: Op, beside: Sequence[Op], b: OpBuilder) -> Iterator[Op]:
    """An exchange that begins, what runs beside it, and the wait for it."""
    (result,) = op.outputs
    under_way = b.value(result.name, result.type)
    yield evolve(op, outputs=(under_way,), attrs=(*op.attrs, (ASYNC.name, "on")))
    yield from beside
    yield Op(WAIT.name, (under_way.name,), (result,), span=op.span)


def _free(there: Op, body: Sequence[Stmt]) -> list[Op]:
    """The ops, in their order, that can be done while a route's rows are under way to its
    experts.
    """
    start = body.index(there)
    staying = list[str]()
    for stmt in body[:start]:
        if _stays(stmt):
            staying += (value.name for value in results(stmt))
    needed = ancestors(body[:start], [*there.inputs, *staying])
    late = set[str]()
    free = list[Op]()
    for i, stmt in enumerate(body):
        names = {value.name for value in results(stmt)}
        if i < start:
            is_free = needed.isdisjoint(names)
        else:
            is_free = not _stays(stmt) and late.isdisjoint(uses(stmt))
            if not is_free:
                late |= names
        if is_free and isinstance(stmt, Op):
            free.append(stmt)
    return free


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
    """Two halves: ops that make anything `needed`, with the other ops whose middle is in the first
    half of products; and the ops that are left.

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
