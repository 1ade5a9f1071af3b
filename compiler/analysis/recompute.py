"""Which forward values backward recomputes instead of reading them from memory.

Purpose: one rule for what `differentiate` writes twice and emitted programs call so: gathers under
`gathered = regather`, ops named by `recompute = selective(…)`, and under `recompute = full` each
layer of an innermost repeat (Chen et al. 2016), whose inputs alone are saved, under `every(n,
layers)` the first of every n layers of one repeat.  Under `recompute = auto(…)` it is the ops or
layers that `choose_recompute` names in `Program.recomputed`.  No value is recomputed for its
shape alone (`Vjp.unread`), since autograd saves shapes.  Non-goals: when backward first needs them
(`passes.differentiate`), and the memory saved (`analysis.memory`).
"""

from ..ir import REPLICATED, Kind, Op, Program, Region, regions_in, walk_regions
from ..ir.placements import ends
from ..ops import OPS
from ..ops.experts import DISPATCH, EXCHANGE
from ..ops.norm import LAYERNORM, RMSNORM
from ..ops.pointwise import FUNCTIONS
from ..ops.rope import ROPE
from ..syntax.diagnostics import Diagnostic, PlanError, did_you_mean, listing
from ..syntax.source import Span

CHEAP = {ROPE.name, RMSNORM.name, LAYERNORM.name, *(entry.name for entry in FUNCTIONS)}
"""The ops that backward recomputes in little time."""


def cheap(program: Program) -> list[str]:
    """Cheap values of a program before any pass that a plan can name."""
    return [name for name in selectable(program) if name in CHEAP]


def selectable(program: Program) -> list[str]:
    """The ops of a program that a plan can name, and that are one call of one result."""
    kinds: dict[str, None] = {}
    for op in program.ops:
        if len(op.outputs) == 1 and op.kind in OPS:
            kinds[name_of(op)] = None
    names = list[str]()
    for kind in kinds:
        if OPS[kind].function and (OPS[kind].user_visible or kind == DISPATCH.name):
            names.append(kind)
    return names


def name_of(op: Op) -> str:
    """The name that `selective(…)` has for an op: `dispatch` is all that leads to the rows of
    experts.
    """
    if op.kind == EXCHANGE.name:
        return DISPATCH.name
    return OPS[op.kind].plan_name


def check(program: Program) -> None:
    """Raises PlanError where `selective(…)` names what the model does not do as one op."""
    recompute = program.train.recompute
    by_layer = recompute.word == "every"
    if by_layer:
        regions = walk_regions(program.region.body)
        able = [region.dim for region in regions if not regions_in(region.body)]
    else:
        able = selectable(program)
    span = program.train.spans.get("recompute", program.region.span)
    errors = [_unknown(name, able, by_layer, span) for name in recompute.names if name not in able]
    if errors:
        raise PlanError(errors)


def _unknown(name: str, able: list[str], by_layer: bool, span: Span) -> Diagnostic:
    message = f"`{name}` cannot be recomputed on its own"
    label = "the model has no such op, or it is split over ranks"
    if by_layer:
        message = f"layers of `{name}` cannot be recomputed"
        label = "it is not the dim of an innermost repeat"
    help = did_you_mean(name, able) or f"it can recompute {listing(able)}"
    return Diagnostic("E0410", message, span, label, help=help)


def is_recomputed(program: Program, op: Op) -> bool:
    """Whether backward recomputes a forward op, wherever it is, rather than read its saved
    result.
    """
    if program.train.recompute.word == "selective" and name_of(op) in program.train.recompute.names:
        return True
    if op.outputs and op.outputs[0].name in program.recomputed:
        return True
    return program.train.gathered == "regather" and gathers(op)


def gathers(op: Op) -> bool:
    """Whether an op is a gather whose conjugate is a reduce-scatter."""
    if op.kind != "coerce":
        return False
    source, target = ends(op)
    return source.kind is Kind.SHARDED and target == REPLICATED


def recomputes_region(program: Program, region: Region) -> bool:
    """Whether backward recomputes layers of a repeat, which has no repeat inside."""
    innermost = region.kind == "repeat" and not regions_in(region.body)
    return bool(recomputes_layers(program, region.dim)) and innermost


def recomputes_layers(program: Program, dim: str) -> int:
    """The interval of recomputed layers in a repeat over `dim`: the first layer of each
    interval is; 0 for none.
    """
    recompute = program.train.recompute
    if recompute.word == "every":
        return recompute.number if dim in recompute.names else 0
    return int(recompute.word == "full" or dim in program.recomputed)
