"""Has kernels be deterministic where several ranks do an op alike, so that their copies stay the
same.

Non-goals: functions of the user's own, which nobody but their author can choose kernels for: an
error.
"""

from math import prod

from attrs import evolve

from ..analysis.determinism import drifting
from ..config.settings import ON
from ..config.units import counted
from ..ir import SEQUENCE, Axis, Op, Program, Region
from ..ops import roles
from ..ops.protocol import DETERMINISTIC
from ..ops.user import CALL
from ..syntax.diagnostics import Diagnostic, Diagnostics, Note, PlanError


def choose_deterministic(program: Program) -> Program:
    """The program, which has placements, with the attribute DETERMINISTIC where an op needs it.

    Raises PlanError.
    """
    found, told = Diagnostics(), dict[str, Op]()
    for op, alike in drifting(program):
        told[op.outputs[0].name] = op
        if op.kind == CALL.name or program.train.compile == ON:
            found.add(PlanError([_cannot(program, op, alike)]))
    found.check()
    return evolve(program, region=_marked(program.region, told)) if told else program


def _marked(region: Region, told: dict[str, Op]) -> Region:
    marked = (
        _marked(stmt, told)
        if isinstance(stmt, Region)
        else evolve(stmt, attrs=(*stmt.attrs, (DETERMINISTIC.name, "on")))
        if stmt.outputs and stmt.outputs[0].name in told
        else stmt
        for stmt in region.body
    )
    return evolve(region, body=tuple(marked))


def _cannot(program: Program, op: Op, alike: list[Axis]) -> Diagnostic:
    """The error for copies that would drift apart."""
    over, ranks = ", ".join(dict.fromkeys(it.parent for it in alike)), prod(it.size for it in alike)
    who, label = (
        f"{counted(ranks, 'rank')} of `{over}` each compute this",
        "their copies of weights would drift apart",
    )
    if op.kind == CALL.name:
        said = f"{who} function, and nothing says that it gives the same bits each time on a GPU"
        help = (
            "put `deterministic` at the end of its `op` if it does, or shard a dim along"
            f" which it works over `{over}`"
        )
        return Diagnostic("E0615", said, op.span, label, help=help)
    found = roles(op, program.types)
    heads = ", ".join(dict.fromkeys((found.heads, found.kv_heads)))
    notes = (Note(program.train.spans["compile"], "layers are compiled"),)
    said = f"{who} attention, and a compiled layer has no deterministic one"
    help = (
        f"shard its heads, `{heads} over {over}`, or its queries, `{SEQUENCE} over {over}`, or"
        " leave `compile` out"
    )
    return Diagnostic("E0615", said, op.span, label, notes, help)
