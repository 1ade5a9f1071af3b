"""Puts the dim that collectives will gather or scatter outermost, so that they need no copies.

Purpose: with sequence or context parallelism activations are [seq, batch, hidden], else [batch,
seq, hidden].  Before: `propagate`.  Non-goals: the layout of parameters, which the plan's arrows
give.
"""

from attrs import evolve

from ..ir import Arg, Enter, Op, Program, Region, Stmt, Type, Value
from ..ops import OPS, TypingError
from ..ops.builder import retyped


def choose_layout(program: Program) -> Program:
    """The program with its inputs' dims reordered, and all types that follow from them."""
    moved, args = _moved(program), list[Arg]()
    for arg in program.region.args:
        dims = sorted(arg.value.type.dims, key=lambda dim: dim not in moved)
        args.append(
            evolve(arg, value=evolve(arg.value, type=evolve(arg.value.type, dims=tuple(dims))))
        )
    given = {p.name: p.type for p in program.stored} | {
        arg.value.name: arg.value.type for arg in args
    }
    try:
        region = _retype(program, evolve(program.region, args=tuple(args)), given)
    except TypingError:  # an op has that dim among its last: better copies than another order
        return program
    relaid = evolve(program, region=region)
    return relaid if _products_hold(relaid) else program


def _products_hold(program: Program) -> bool:
    """Whether every product still sums over the last dims of its left side."""
    found = program.types
    products = [op for op in program.ops if op.kind == "contract"]
    return all(
        found[op.inputs[0]].dims[-len(op.names("over")) :] == op.names("over") for op in products
    )


def _moved(program: Program) -> set[str]:
    """Input dims that share an axis with a dim of an earlier rule, where that works, or that an
    op needs whole.
    """
    inputs = {dim for arg in program.region.args for dim in arg.value.type.dims}
    late = {
        late.dim
        for late in program.claims
        for early in program.claims
        if late.axis == early.axis and early.rank < late.rank
    }
    return inputs & (late | _needed_whole(program))


def _needed_whole(program: Program) -> set[str]:
    """The dims that an op works on over an axis, and needs whole of some of its operands."""
    found = set[str]()
    for op in program.ops:
        whole = OPS[op.kind].whole_operands(program.operands(op), op)
        found |= {item.partition(":")[2] for item in op.names("work")} & frozenset().union(
            *whole.values()
        )
    return found


def _retype(program: Program, region: Region, found: dict[str, Type]) -> Region:
    """Infers every type from the new layout, operands first."""
    body: list[Stmt] = []
    for stmt in region.body:
        if isinstance(stmt, Op):
            stmt = retyped(program, stmt, found)
            found |= {value.name: value.type for value in stmt.outputs}
        else:
            args = tuple(_retyped_arg(arg, stmt.dim, found) for arg in stmt.args)
            found |= {arg.value.name: arg.value.type for arg in args}
            stmt = _retype(program, evolve(stmt, args=args), found)
            found |= {value.name: value.type for value in stmt.results}
        body.append(stmt)
    results = tuple(
        Value(v.name, found[end.name])
        for v, end in zip(region.results, region.yields, strict=False)
    )
    return evolve(region, body=tuple(body), results=results)


def _retyped_arg(arg: Arg, dim: str, known: dict[str, Type]) -> Arg:
    source = known[arg.source]
    return evolve(
        arg, value=Value(arg.value.name, source.inside(dim) if arg.enter is Enter.EACH else source)
    )
