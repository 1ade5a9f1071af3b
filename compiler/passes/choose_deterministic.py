"""Has kernels be deterministic where several ranks do an op alike, so that their copies stay the
same.

Non-goals: functions of the user's own, which nobody but their author can choose kernels for: an
error.
"""

from math import prod

from attrs import evolve

from ..analysis.determinism import drifting
from ..config.settings import ON
from ..config.units import count_words
from ..ir import SEQUENCE, Axis, Op, Program, Region, Stmt
from ..ops import roles
from ..ops.protocol import DETERMINISTIC
from ..ops.user import CALL
from ..syntax.diagnostics import Diagnostic, Diagnostics, Note, PlanError


def choose_deterministic(program: Program) -> Program:
    """The program, which has placements, with the attribute DETERMINISTIC where an op needs it.

    Raises PlanError.
    """
    diagnostics, marked = Diagnostics(), set[str]()
    for op, alike in drifting(program):
        marked.add(op.outputs[0].name)
        if op.kind == CALL.name or program.train.compile == ON:
            diagnostics.add(PlanError([_cannot(program, op, alike)]))
    diagnostics.check()
    if not marked:
        return program
    return evolve(program, region=_mark_deterministic(program.region, marked))


def _mark_deterministic(region: Region, results: set[str]) -> Region:
    """The region with the attribute on the ops with these first results, at any depth."""
    body = list[Stmt]()
    for stmt in region.body:
        if isinstance(stmt, Region):
            stmt = _mark_deterministic(stmt, results)
        elif stmt.outputs and stmt.outputs[0].name in results:
            stmt = evolve(stmt, attrs=(*stmt.attrs, (DETERMINISTIC.name, "on")))
        body.append(stmt)
    return evolve(region, body=tuple(body))


def _cannot(program: Program, op: Op, alike: list[Axis]) -> Diagnostic:
    """The error for copies that would drift apart."""
    over = ", ".join(dict.fromkeys(axis.parent for axis in alike))
    ranks = prod(axis.size for axis in alike)
    who = f"{count_words(ranks, 'rank')} of `{over}` each compute this"
    label = "their copies of weights would drift apart"
    if op.kind == CALL.name:
        message = f"{who} function, and nothing says that it gives the same bits each time on a GPU"
        help = (
            "put `deterministic` at the end of its `op` if it does, or shard a dim along"
            f" which it works over `{over}`"
        )
        return Diagnostic("E0615", message, op.span, label, help=help)
    dims = roles(op, program.types)
    heads = ", ".join(dict.fromkeys((dims.heads, dims.kv_heads)))
    notes = (Note(program.train.spans["compile"], "layers are compiled"),)
    message = f"{who} attention, and a compiled layer has no deterministic one"
    help = (
        f"shard its heads, `{heads} over {over}`, or its queries, `{SEQUENCE} over {over}`, or"
        " leave `compile` out"
    )
    return Diagnostic("E0615", message, op.span, label, notes, help)
