"""`scalec explain VALUE PLAN`: why a value is placed so, and what its coercions send."""

from collections.abc import Iterator, Mapping

from ..analysis.causality import What, kinds_seen
from ..analysis.collective import Collective
from ..analysis.communication import collectives, places
from ..analysis.time.op_rows import OpRow
from ..config.units import amount
from ..ir import SEQUENCE, Axis, Claim, Op, Param, Program, Type, Value, base
from .summary import table


def names_of(program: Program) -> list[str]:
    """The names of values in a plan: of parameters, and of values that statements bind."""
    return [name for name in dict.fromkeys(map(base, program.types)) if not name.startswith("_")]


def explain_value(
    name: str, worked: Program, placed: Program, final: Program, rows: Mapping[str, OpRow]
) -> str:
    """Everything that decided where a value lies, for people.

    `worked` is the program after `propagate`, `placed` after `insert_collectives`, `final` after
    the last pass; `rows` are its ops by the name of their results, where the GPU's speed is known.
    """
    parts: dict[str, None] = {}
    for param in placed.params:
        if param.name == name:
            parts["\n".join(_param(param, placed))] = None
    makers: dict[str, Op] = {}
    for op in worked.ops:
        for value in op.outputs:
            if base(value.name) == name:
                makers[value.name] = op
    seen = kinds_seen(worked)
    for op in placed.ops:
        for value in op.outputs:
            if value.name in makers and op.kind not in ("leaf", "coerce"):
                maker = makers[value.name]
                part = "\n".join([*_value(value, maker, worked), *_tokens(value, seen)])
                parts[part] = None
    lines = {str(op.span) for op in makers.values() if op.kind != "leaf"}
    return "\n\n".join([*parts, *_coercions(name, lines, final, rows)])


def _param(param: Param, program: Program) -> Iterator[str]:
    """The placement of a parameter on each axis, by the rules that name a dim of it."""
    yield f"{param.name}: {_type_text(param.type)}, a parameter  {param.span}"
    for axis in program.axes:
        claims = [claim for claim in _claims_of_axis(axis, program) if claim.dim in param.type.dims]
        yield _why(axis, param.type, claims, "no rule over it names a dim of the parameter")


def _value(value: Value, op: Op, program: Program) -> Iterator[str]:
    """The placement of a value on each axis, by the rules that name a dim of its op."""
    yield f"{value.name}: {_type_text(value.type)}, made by `{op.kind}`  {op.span}"
    dims_of_op: set[str] = set()
    for type in (*program.operands(op), value.type):
        dims_of_op.update(type.dims)
    dim_by_axis: dict[str, str] = {}
    for entry in op.names("work"):
        name, _, dim = entry.partition(":")
        dim_by_axis[name] = dim
    for axis in program.axes:
        claims = [claim for claim in _claims_of_axis(axis, program) if claim.dim in dims_of_op]
        first = [claim for claim in claims if claim.dim == dim_by_axis.get(axis.name)]
        others = [claim for claim in claims if claim not in first]
        if not claims:
            yield _why(axis, value.type, [], "no rule over it names a dim of the op")
        elif not first:
            yield _why(axis, value.type, [], "the op is done alike by all of its ranks")
        else:
            yield _why(axis, value.type, [*first, *others], "")


def _tokens(value: Value, seen: Mapping[str, tuple[What, ...]]) -> Iterator[str]:
    """The tokens on which a value with positions depends."""
    if SEQUENCE in value.type.dims:
        others = {"later": "later ones", "document": "other documents"}
        words = ["its own token", "earlier ones", *(others[what] for what in seen[value.name])]
        yield f"  tokens: {', '.join(words[:-1])} and {words[-1]}"


def _claims_of_axis(axis: Axis, program: Program) -> list[Claim]:
    claims = [claim for claim in program.claims if claim.axis == axis.name and not claim.within]
    return sorted(claims, key=lambda claim: claim.rank)


def _why(axis: Axis, type: Type, claims: list[Claim], none: str) -> str:
    """`tp: S(heads), by `heads over tp` (tiny.scale:10), before `seq over tp` (tiny.scale:11)`."""
    if not claims:
        return f"  {axis.name}: {type.placement_on(axis.name)}, {none}"
    rules = [f"`{claim.dim} over {axis.parent}` ({claim.span})" for claim in claims]
    placement = str(type.placement_on(axis.name))
    sums = ""
    if placement == "P":
        sums = f"a sum over `{claims[0].dim}` that is still to be done, "
    words = f"  {axis.name}: {placement}, {sums}by {rules[0]}"
    if len(rules) > 1:
        words += f", before {', '.join(rules[1:])}"
    return words


def _type_text(type: Type) -> str:
    return f"{type.dtype}[{', '.join(type.dims)}]"


def _coercions(
    name: str, lines: set[str], final: Program, rows: Mapping[str, OpRow]
) -> Iterator[str]:
    """A table of the coercions of the value and of its gradient, and of the buckets that hold
    it.
    """
    calls: dict[str, Collective] = {}
    for rank in places(final):
        for call in collectives(final, rank):
            calls[call.value] = call
    buckets = {bucket.name for bucket in final.buckets if name in bucket.params}
    cells: list[tuple[str, ...]] = []
    for op in final.ops:
        if op.kind != "coerce":
            continue
        result = op.outputs[0].name
        call = calls.get(result)
        if _is_about(op, name, lines) or (call and call.bucket in buckets):
            cells.append(_coercion(op, call, rows.get(result)))
    if not cells:
        yield f"`{name}` has no coercions"
        return
    head = ("coercion", "collective", "calls in a step", "where", "time", "line")
    yield "\n".join(table([head, *cells], "lllll"))


def _is_about(coercion: Op, name: str, lines: set[str]) -> bool:
    """Whether a coercion is of the value or of its gradient; or of a value without a name on one
    of the value's lines.
    """
    operand = base(coercion.inputs[0]).removeprefix("d_")
    result = base(coercion.outputs[0].name).removeprefix("d_")
    if name in (operand, result):
        return True
    has_unnamed = operand.startswith("_") or result.startswith("_")
    return has_unnamed and str(coercion.span) in lines


def _coercion(op: Op, call: Collective | None, row: OpRow | None) -> tuple[str, ...]:
    """The cells of a coercion, with its collective and its time where there are any."""
    axes = ", ".join(op.names("axes"))
    change = f"{op.inputs[0]} {op.get('from')}→{op.get('to')} over {axes}"
    sent = ("nothing is sent", "", "")
    if call:
        sent = (call.op, f"{call.count} × {amount(call.bytes)}", call.where)
    seconds = ""
    if row and row.sends:
        seconds = f"{sum(row.sends.values()) * 1e3:.3g} ms"
    return change, *sent, seconds, str(op.span)
