"""Reads coercions between placements."""

import ast

from ....ir import Attr, Op
from ....ir.placements import coercion_of
from ..ast_matching import demand, literal, wrong
from ..expressions import Expressions, Reader
from ..values import Local, ends_of


def coercion(function: str) -> Reader:
    """The coercions by one function of the runtime."""
    return lambda e, call: coerced(e, call, function)


def coerced(e: Expressions, call: ast.Call, function: str, again: bool = False) -> Local:
    """A coercion by the runtime's `function`; `again` says whether backward gathers once more."""
    demand(call, len(call.args) == 2, "a coercion takes an operand and an axis")
    x, axes = e.plain(call.args[0]), e.group(call.args[1])
    options = {str(keyword.arg): literal(keyword.value) for keyword in call.keywords}
    for source, target in ends_of(function, x, options):
        attrs: dict[str, Attr] = {"axes": axes, "from": source, "to": target}
        if e.ops.has("coerce", [x.name], attrs):
            op = e.ops.take(call, "coerce", [x.name], attrs)
            e.ops.in_turn(call, op)
            _demand_once(e, call, op, again)
            return e.local(op.outputs[0].name)
    raise wrong(call, f"the IR has no such coercion of {x.name} over {axes} that is not done yet")


def _demand_once(e: Expressions, call: ast.Call, op: Op, again: bool) -> None:
    if coercion_of(op).function == "all_gather" and not e.whole:
        count = e.again[e.ops.first(op.outputs[0].name)]
        demand(call, count == again, f"in the IR, backward gathers {op.outputs[0].name} again {count} times")
