"""Puts the dim that collectives will gather or scatter outermost, so that they need no copies.

Purpose: with sequence parallelism activations are [seq, batch, hidden], else [batch, seq, hidden].
Before: `propagate`.  Non-goals: the layout of parameters, which the plan's arrows give.
"""

from attrs import evolve

from ..ir import Arg, Enter, Op, Program, Region, Stmt, Type, Value
from ..ops import OPS


def choose_layout(program: Program) -> Program:
    """The program with its inputs' dims reordered, and all types that follow from them."""
    moved = _moved(program)
    args = tuple(
        evolve(arg, value=evolve(arg.value, type=_moved_first(arg.value.type, moved))) for arg in program.region.args
    )
    types = {p.name: p.type for p in program.params} | {arg.value.name: arg.value.type for arg in args}
    return evolve(program, region=_retype(program, evolve(program.region, args=args), types))


def _moved(program: Program) -> set[str]:
    """Input dims that share an axis with a dim of an earlier rule: they are gathered where that dim works."""
    inputs = {dim for arg in program.region.args for dim in arg.value.type.dims}
    return {
        late.dim
        for late in program.claims
        for early in program.claims
        if late.axis == early.axis and early.rank < late.rank and late.dim in inputs
    }


def _moved_first(type: Type, moved: set[str]) -> Type:
    return evolve(type, dims=tuple(sorted(type.dims, key=lambda dim: dim not in moved)))


def _retype(program: Program, region: Region, types: dict[str, Type]) -> Region:
    """Infers every type again, operands first."""
    body: list[Stmt] = []
    for stmt in region.body:
        if isinstance(stmt, Op):
            stmt = _retyped_op(program, stmt, types)
            types |= {value.name: value.type for value in stmt.outputs}
        else:
            args = tuple(_retyped_arg(arg, stmt.dim, types) for arg in stmt.args)
            types |= {arg.value.name: arg.value.type for arg in args}
            stmt = _retype(program, evolve(stmt, args=args), types)
            types |= {value.name: value.type for value in stmt.results}
        body.append(stmt)
    results = tuple(Value(v.name, types[end.name]) for v, end in zip(region.results, region.yields, strict=False))
    return evolve(region, body=tuple(body), results=results)


def _retyped_op(program: Program, op: Op, types: dict[str, Type]) -> Op:
    found = OPS[op.kind].infer(program, [types[name] for name in op.inputs], op)
    return evolve(op, outputs=tuple(Value(v.name, t) for v, t in zip(op.outputs, found, strict=True)))


def _retyped_arg(arg: Arg, dim: str, types: dict[str, Type]) -> Arg:
    source = types[arg.source]
    return evolve(arg, value=Value(arg.value.name, source.inside(dim) if arg.enter is Enter.EACH else source))
