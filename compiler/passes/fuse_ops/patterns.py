"""Patterns of neighbouring ops that become one: gates, sums with their norms, rotations, products
of one value, joint collectives; but for the loss (`loss`).
"""

from collections.abc import Sequence
from itertools import groupby

from attrs import evolve

from ...analysis.bucket_layout import is_stored_as_matrix
from ...analysis.recompute import is_recomputed
from ...ir import DATA_DIMS, Kind, Op, Param, Stmt, Value, base, ops_in
from ...ir.placements import ends
from ...ops.attention import ATTENTION
from ...ops.concat import CONCAT, SPLIT
from ...ops.fused import CONTRACTS, GATES, NORMS
from ...ops.rope import ROPE, ROPE_PAIR
from .context import FusionContext, replace_ops


def gates(body: tuple[Stmt, ...], known: FusionContext) -> tuple[Stmt, ...]:
    """f(x) · y: fuses functions whose values are used in a product with a value of the same
    type, and nowhere else.
    """
    functions = known.ops_by_result(body, *GATES)
    by: dict[int, Op | None] = {}
    for index, op in known.ops(body, "mul"):
        name = next((n for n in op.inputs if n in functions and known.uses[n] == 1), "")
        if not name or len({known.types[n] for n in op.inputs}) != 1:
            continue
        first, function = functions[name]
        (other,) = (n for n in op.inputs if n != name)
        if other not in function.inputs:
            inputs = (*function.inputs, other)
            by[first] = None
            by[index] = evolve(op, kind=GATES[function.kind], inputs=inputs, attrs=function.attrs)
    return replace_ops(body, by)


def norms(body: tuple[Stmt, ...], known: FusionContext) -> tuple[Stmt, ...]:
    """x + y and its norm: fuses sums of two values with the first norm of each, where the sum
    is used besides.
    """
    sums = known.ops_by_result(body, "add")
    by: dict[int, Op | None] = {}
    for index, op in known.ops(body, *NORMS):
        total, *weights = op.inputs
        first, add = sums.pop(total, (0, None))
        if not add or known.uses[total] <= 1 or not _two_alike(add, known):
            continue
        if known.parameters.keys() >= {*weights}:
            inputs, outputs = (*add.inputs, *weights), (*add.outputs, *op.outputs)
            by[index] = None
            by[first] = evolve(op, kind=NORMS[op.kind], inputs=inputs, outputs=outputs)
    return replace_ops(body, by)


def _two_alike(add: Op, known: FusionContext) -> bool:
    """Whether two values of one type are added."""
    types = {known.types[name] for name in (*add.inputs, add.outputs[0].name)}
    return len(add.inputs) == 2 and len(types) == 1


def ropes(body: tuple[Stmt, ...], known: FusionContext) -> tuple[Stmt, ...]:
    """Fuses the rotations of an attention's queries and keys, by the same angles."""
    rotations = known.ops_by_result(body, ROPE.name)
    by: dict[int, Op | None] = {}
    for op in ops_in(body):
        if op.kind != ATTENTION.name:
            continue
        pair = [rotations[name] for name in op.inputs[:2] if name in rotations]
        if len(pair) != 2 or len({rope.attrs for _, rope in pair}) != 1 or pair[0] == pair[1]:
            continue
        (first, q), (second, k) = sorted(pair, key=lambda place: place[0])
        # it moves after other uses, or is paired
        if known.uses[q.outputs[0].name] == 1 and second not in by:
            inputs, outputs = (*q.inputs, *k.inputs), (*q.outputs, *k.outputs)
            by[first] = None
            by[second] = Op(ROPE_PAIR.name, inputs, outputs, q.attrs, span=q.span)
    return replace_ops(body, by)


# ---- x·w₁, x·w₂, …: one product with weights that are adjacent in memory, as for queries, keys and
# values

# Only those weights are joined that can be adjacent, however state is sharded: they share a bucket,
# and a group of the optimizer's settings.


def products(body: tuple[Stmt, ...], known: FusionContext) -> tuple[Stmt, ...]:
    """Fuses products of one value with parameters that nothing else reads, over the same dims
    and stored alike.
    """
    alike: dict[object, list[tuple[int, Op]]] = {}
    for index, op in known.ops(body, "contract"):
        x, weight = op.inputs
        param = known.parameters.get(weight)
        if param and x not in known.parameters and _is_free(param, op, known):
            alike.setdefault((x, op.attrs, _storage_key(param, known)), []).append((index, op))
    rotated = set[str]()
    for op in ops_in(body):
        if op.kind == ROPE.name:
            rotated.update(op.inputs)
    by: dict[int, Op | None] = {}
    for several in alike.values():
        if len(several) > 1:
            by |= dict.fromkeys((index for index, _ in several), None)
            by[several[0][0]] = _join_products([op for _, op in several], rotated)
    return replace_ops(body, by)


def _is_free(param: Param, op: Op, known: FusionContext) -> bool:
    """Whether a weight is stored as the matrix that a product takes, and nothing else takes it."""
    return (
        is_stored_as_matrix(param)
        and param.inner == len(op.names("over"))
        and known.readers[param.name] == 1
    )


def _storage_key(param: Param, known: FusionContext) -> object:
    """The properties that weights of one bucket and one group of settings share: repeats, axes,
    sharded dims, state.
    """
    axes = frozenset(axis for axis, place in param.type.places if place.dim)
    state = evolve(known.program.state_of(param.name), param_patterns=())
    place = known.program.train.optimizer.place(param.name)
    return len(param.type.dims), param.type.dims[: param.stacked], axes, state, place


def _join_products(several: Sequence[Op], rotated: set[str]) -> Op:
    """One op for all; saved results get memory of their own, if others in that memory are not
    saved.

    The operands of rope, `rotated`, are not.
    """
    first, weights = several[0], tuple(op.inputs[1] for op in several)
    outputs = tuple(op.outputs[0] for op in several)
    saved = tuple(str(i) for i, value in enumerate(outputs) if value.name not in rotated)
    apart = (("apart", saved),) if 0 < len(saved) < len(outputs) else ()
    return Op(
        CONTRACTS.name,
        (first.inputs[0], *weights),
        outputs,
        (*first.attrs, *apart),
        span=first.span,
    )


# ---- neighbouring gathers, or exchanges, over the same ranks as one, of their values side by side:
# of keys and values

# One collective in place of two, forward and backward, for a copy of what goes in; but for gathers
# that backward repeats, each when its first consumer needs it.


def joint_coercions(body: tuple[Stmt, ...], known: FusionContext) -> tuple[Stmt, ...]:
    """Joins coercions from a sharded dim that follow one another and differ in the last dims of
    their values alone.
    """
    joined: list[Stmt] = []
    for alike, run in groupby(body, lambda stmt: _alike(stmt, known)):
        stmts = tuple(run)
        if alike and len(stmts) > 1:
            joined += _together(ops_in(stmts), known)
        else:
            joined += stmts
    return tuple(joined)


def _alike(stmt: Stmt, known: FusionContext) -> object:
    """The properties that coercions of one call share; None for a statement that is by itself."""
    if not isinstance(stmt, Op) or stmt.kind != "coerce" or is_recomputed(known.program, stmt):
        return None
    type, (source, target) = known.types[stmt.inputs[0]], ends(stmt)
    sharded = {target.dim, *(place.dim for _, place in type.places)}
    if source.kind is not Kind.SHARDED or type.dims[-1] in {*sharded, *DATA_DIMS}:
        return None
    return stmt.attrs, evolve(type, dims=type.dims[:-1])


def _together(several: Sequence[Op], known: FusionContext) -> list[Stmt]:
    """The values side by side, their coercion, and its parts."""
    first, operands = several[0], list[str]()
    outputs = list[Value]()
    for op in several:
        operands.append(op.inputs[0])
        outputs.append(op.outputs[0])
    parts = tuple(known.types[name].dims[-1] for name in operands)
    dim = known.dim("_".join(parts), sum(map(known.program.size, parts)), first.span)
    stem = "_".join(map(base, operands))
    values = list[Value]()
    for type in (known.types[operands[0]], first.outputs[0].type):
        whole_type = evolve(type, dims=(*type.dims[:-1], dim))
        values.append(Value(known.names.fresh(stem), whole_type))
    whole, coerced = values
    attrs = (("parts", parts),)
    return [
        Op(CONCAT.name, tuple(operands), (whole,), (("as", dim),), span=first.span),
        evolve(first, inputs=(whole.name,), outputs=(coerced,)),
        Op(SPLIT.name, (coerced.name,), tuple(outputs), attrs, span=first.span),
    ]
