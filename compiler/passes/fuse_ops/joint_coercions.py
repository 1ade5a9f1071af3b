"""Neighbouring gathers, or exchanges, over the same ranks as one, of their values side by side: of keys and values.

Purpose: one collective in place of two, forward and backward, for a copy of what goes in.
Non-goals: gathers that backward repeats, each when its first consumer needs it.
"""

from collections.abc import Sequence
from itertools import groupby

from attrs import evolve

from ...analysis.recompute import is_recomputed
from ...ir import DATA_DIMS, Kind, Op, Stmt, Value, base, ops_in
from ...ir.placements import ends
from ...ops.concat import CONCAT, SPLIT
from .context import Known


def joint_coercions(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Joins coercions from a sharded dim that follow one another and differ in the last dims of their values alone."""
    made: list[Stmt] = []
    for alike, run in groupby(body, lambda stmt: _alike(stmt, known)):
        stmts = tuple(run)
        made += _together(ops_in(stmts), known) if alike and stmts[1:] else stmts
    return tuple(made)


def _alike(stmt: Stmt, known: Known) -> object:
    """The properties that coercions of one call share; None for a statement that is by itself."""
    if not isinstance(stmt, Op) or stmt.kind != "coerce" or is_recomputed(known.program, stmt):
        return None
    type, (source, target) = known.types[stmt.inputs[0]], ends(stmt)
    sharded = {target.dim, *(place.dim for _, place in type.places)}
    if source.kind is not Kind.SHARDED or type.dims[-1] in {*sharded, *DATA_DIMS}:
        return None
    return stmt.attrs, evolve(type, dims=type.dims[:-1])


def _together(several: Sequence[Op], known: Known) -> list[Stmt]:
    """The values side by side, their coercion, and its parts."""
    first, operands = several[0], tuple(op.inputs[0] for op in several)
    parts = tuple(known.types[name].dims[-1] for name in operands)
    dim = known.dim("_".join(parts), sum(map(known.program.size, parts)), first.span)
    types = (evolve(type, dims=(*type.dims[:-1], dim)) for type in (known.types[operands[0]], first.outputs[0].type))
    whole, coerced = (Value(known.names.fresh("_".join(map(base, operands))), type) for type in types)
    return [
        Op(CONCAT.name, operands, (whole,), (("as", dim),), span=first.span),
        evolve(first, inputs=(whole.name,), outputs=(coerced,)),
        Op(SPLIT.name, (coerced.name,), tuple(op.outputs[0] for op in several), (("parts", parts),), span=first.span),
    ]
