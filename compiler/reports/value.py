"""`scalec explain VALUE PLAN`: why a value is placed so, and what its coercions send."""

from collections.abc import Iterator, Mapping

from ..analysis.causality import What, kinds_seen
from ..analysis.communication import collectives, places
from ..analysis.time.op_rows import OpRow
from ..config.units import amount
from ..ir import SEQUENCE, Axis, Claim, Op, Param, Program, Type, Value, base
from .summary import table


def names_of(program: Program) -> list[str]:
    """The values of a plan that have a name there: those that statements bind, and parameters."""
    return [name for name in dict.fromkeys(map(base, program.types)) if not name.startswith("_")]


def explain_value(
    name: str, worked: Program, placed: Program, final: Program, rows: Mapping[str, OpRow]
) -> str:
    """All that decided where a value lies, for people.

    `worked` is the program after `propagate`, `placed` after `insert_collectives`, `final` after
    the last pass; `rows` are its ops by the name of their results, where the GPU's speed is known.
    """
    params = [param for param in placed.params if param.name == name]
    made = {value.name: op for op in worked.ops for value in op.outputs if base(value.name) == name}
    seen = kinds_seen(worked)
    parts = [*map("\n".join, [_param(param, placed) for param in params])]
    for op in placed.ops:
        for value in op.outputs:
            if value.name in made and op.kind not in ("leaf", "coerce"):
                parts.append(
                    "\n".join([*_value(value, made[value.name], worked), *_tokens(value, seen)])
                )
    lines = {str(op.span) for op in made.values() if op.kind != "leaf"}
    return "\n\n".join([*dict.fromkeys(parts), *_coercions(name, lines, final, rows)])


def _param(param: Param, program: Program) -> Iterator[str]:
    yield f"{param.name}: {_shown(param.type)}, a parameter  {param.span}"
    for axis in program.axes:
        own = [claim for claim in _over(axis, program) if claim.dim in param.type.dims]
        yield _why(axis, param.type, own, "no rule over it names a dim of the parameter")


def _value(value: Value, op: Op, program: Program) -> Iterator[str]:
    """Its placement on each axis, by the rules that name a dim of the op that makes it."""
    yield f"{value.name}: {_shown(value.type)}, made by `{op.kind}`  {op.span}"
    space = {dim for type in (*program.operands(op), value.type) for dim in type.dims}
    work = {entry.partition(":")[0]: entry.partition(":")[2] for entry in op.names("work")}
    for axis in program.axes:
        named = [claim for claim in _over(axis, program) if claim.dim in space]
        first = [claim for claim in named if claim.dim == work.get(axis.name)]
        rest = [claim for claim in named if claim not in first]
        none = (
            "no rule over it names a dim of the op"
            if not named
            else "the op is done alike by all of its ranks"
        )
        yield _why(axis, value.type, [*first, *rest] if first else [], none)


def _tokens(value: Value, seen: Mapping[str, tuple[What, ...]]) -> Iterator[str]:
    """The tokens on which a value with positions depends."""
    if SEQUENCE in value.type.dims:
        others = {"later": "later ones", "document": "other documents"}
        words = ["its own token", "earlier ones", *(others[what] for what in seen[value.name])]
        yield f"  tokens: {', '.join(words[:-1])} and {words[-1]}"


def _over(axis: Axis, program: Program) -> list[Claim]:
    claims = [claim for claim in program.claims if claim.axis == axis.name and not claim.within]
    return sorted(claims, key=lambda claim: claim.rank)


def _why(axis: Axis, type: Type, claims: list[Claim], none: str) -> str:
    """`tp: S(heads), by `heads over tp` (tiny.scale:10), before `seq over tp` (tiny.scale:11)`."""
    if not claims:
        return f"  {axis.name}: {type.at(axis.name)}, {none}"
    first, *lost = (f"`{claim.dim} over {axis.parent}` ({claim.span})" for claim in claims)
    sums = (
        f"a sum over `{claims[0].dim}` that is still to be done, "
        if str(type.at(axis.name)) == "P"
        else ""
    )
    return (
        f"  {axis.name}: {type.at(axis.name)}, {sums}by"
        f" {first}{', before ' * bool(lost)}{', '.join(lost)}"
    )


def _shown(type: Type) -> str:
    return f"{type.dtype}[{', '.join(type.dims)}]"


def _coercions(
    name: str, lines: set[str], final: Program, rows: Mapping[str, OpRow]
) -> Iterator[str]:
    """A table of the coercions of the value and of its gradient, and of the buckets that hold
    it.
    """
    calls = {each.value: each for rank in places(final) for each in collectives(final, rank)}
    buckets = {bucket.name for bucket in final.buckets if name in bucket.params}
    found: list[tuple[str, ...]] = []
    for op in final.ops:
        if op.kind != "coerce":
            continue
        call, row = calls.get(op.outputs[0].name), rows.get(op.outputs[0].name)
        around = {
            base(op.inputs[0]).removeprefix("d_"),
            base(op.outputs[0].name).removeprefix("d_"),
        }
        own = name in around or (
            str(op.span) in lines and any(each.startswith("_") for each in around)
        )
        if own or (call and call.bucket in buckets):
            change = (
                f"{op.inputs[0]} {op.get('from')}→{op.get('to')} over {', '.join(op.names('axes'))}"
            )
            sent = (
                (call.op, f"{call.count} × {amount(call.bytes)}", call.where)
                if call
                else ("nothing is sent", "", "")
            )
            seconds = f"{sum(row.sends.values()) * 1e3:.3g} ms" if row and row.sends else ""
            found.append((change, *sent, seconds, str(op.span)))
    if not found:
        yield f"`{name}` has no coercions"
        return
    head = ("coercion", "collective", "calls in a step", "where", "time", "line")
    yield "\n".join(table([head, *found], "lllll"))
