"""Puts the dim that collectives will gather or scatter outermost, so that they need no copies.

Purpose: with sequence or context parallelism activations are [seq, batch, hidden], else [batch,
seq, hidden].  Before: `propagate`.  Non-goals: the layout of parameters, which the plan's arrows
give.
"""

from attrs import evolve

from ..ir import Arg, Enter, Op, Program, Region, Stmt, Type, Value, results
from ..ops import OPS, TypingError
from ..ops.builder import infer_types


def choose_layout(program: Program) -> Program:
    """The program with its inputs' dims reordered, and all types that follow from them."""
    moved, args = _outermost_dims(program), list[Arg]()
    types = {param.name: param.type for param in program.params_and_buffers}
    for arg in program.region.args:
        dims = tuple(sorted(arg.value.type.dims, key=lambda dim: dim not in moved))
        value = evolve(arg.value, type=evolve(arg.value.type, dims=dims))
        args.append(evolve(arg, value=value))
        types[value.name] = value.type
    try:
        region = _retype(program, evolve(program.region, args=tuple(args)), types)
    except TypingError:  # an op has that dim among its last: better copies than another order
        return program
    relaid = evolve(program, region=region)
    return relaid if _products_hold(relaid) else program


def _products_hold(program: Program) -> bool:
    """Whether every product still sums over the last dims of its left side."""
    types = program.types
    for op in program.ops:
        if op.kind == "contract":
            over = op.names("over")
            if types[op.inputs[0]].dims[-len(over) :] != over:
                return False
    return True


def _outermost_dims(program: Program) -> set[str]:
    """Input dims that share an axis with a dim of an earlier rule, where that works, or that an
    op needs whole.
    """
    inputs = set[str]()
    for arg in program.region.args:
        inputs.update(arg.value.type.dims)
    late = set[str]()
    for claim in program.claims:
        for other in program.claims:
            if claim.axis == other.axis and other.rank < claim.rank:
                late.add(claim.dim)
    return inputs & (late | _needed_whole(program))


def _needed_whole(program: Program) -> set[str]:
    """The dims that an op works on over an axis, and needs whole of some of its operands."""
    needed = set[str]()
    for op in program.ops:
        worked = {item.partition(":")[2] for item in op.names("work")}
        for dims in OPS[op.kind].whole_operands(program.operands(op), op).values():
            needed |= worked & frozenset(dims)
    return needed


def _retype(program: Program, region: Region, types: dict[str, Type]) -> Region:
    """Infers every type from the new layout, operands first, and adds it to `types`."""
    body: list[Stmt] = []
    for stmt in region.body:
        if isinstance(stmt, Op):
            stmt = infer_types(program, stmt, types)
        else:
            args = tuple(_retype_arg(arg, stmt.dim, types) for arg in stmt.args)
            for arg in args:
                types[arg.value.name] = arg.value.type
            stmt = _retype(program, evolve(stmt, args=args), types)
        for value in results(stmt):
            types[value.name] = value.type
        body.append(stmt)
    ends = list[Value]()
    for value, end in zip(region.results, region.yields, strict=False):
        ends.append(Value(value.name, types[end.name]))
    return evolve(region, body=tuple(body), results=tuple(ends))


def _retype_arg(arg: Arg, dim: str, types: dict[str, Type]) -> Arg:
    type = types[arg.source]
    if arg.enter is Enter.EACH:
        type = type.inside(dim)
    return evolve(arg, value=Value(arg.value.name, type))
