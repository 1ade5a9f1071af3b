"""Which forward values backward makes again instead of having them kept.

Purpose: one rule for what `differentiate` writes twice and emitted programs call so: gathers under `gathered =
regather`, ops named by `recompute = selective(…)`, and under `recompute = full` each turn of an innermost repeat (Chen
et al. 2016), of which only what enters it is kept.
Non-goals: when backward first needs them (`passes.differentiate`), and what that saves (`memory`).
"""

from .diagnostics import Diagnostic, PlanError, did_you_mean, listing
from .ir import REPLICATED, Kind, Op, Program, Region, walk
from .ops import OPS
from .placements import ends
from .source import Span


def selectable(program: Program) -> list[str]:
    """The ops of a program that a plan calls by their names, and that are one call of one result."""
    kinds = dict.fromkeys(op.kind for op in walk(program.region.body) if len(op.outputs) == 1)
    return [kind for kind in kinds if kind in OPS and OPS[kind].surface and OPS[kind].function]


def check(program: Program) -> None:
    """Raises PlanError where `selective(…)` names what the model does not do as one op."""
    recompute, able = program.train.recompute, selectable(program)
    span = program.train.spans.get("recompute", program.region.span)
    errors = [_unknown(name, able, span) for name in recompute.names if name not in able]
    if errors:
        raise PlanError(errors)


def _unknown(name: str, able: list[str], span: Span) -> Diagnostic:
    message = f"backward cannot do `{name}` again by itself"
    label = "the model has no such op, or it is divided over ranks"
    return Diagnostic("E0410", message, span, label, help=did_you_mean(name, able) or f"it can do {listing(able)}")


def is_made_again(program: Program, op: Op) -> bool:
    """Whether backward does a forward op again rather than read its result, wherever it stands."""
    if op.kind in program.train.recompute.names:
        return True
    return program.train.gathered == "regather" and _gathers(op)


def _gathers(op: Op) -> bool:
    """Whether an op is a gather whose conjugate is a reduce-scatter."""
    if op.kind != "coerce":
        return False
    source, target = ends(op)
    return source.kind is Kind.SHARDED and target == REPLICATED


def runs_again(program: Program, region: Region) -> bool:
    """Whether backward does each turn of a repeat again: those with no repeat inside."""
    innermost = region.kind == "repeat" and not any(isinstance(stmt, Region) for stmt in region.body)
    return program.train.recompute.word == "full" and innermost
