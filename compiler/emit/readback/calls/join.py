"""Reads what joins values, and takes them apart."""

import ast

from ....ir import walk
from ..ast_matching import demand, keywords, literal, wrong
from ..expressions import Expressions
from ..values import Local, Seen


def concat(e: Expressions, call: ast.Call) -> Local:
    """Torch does not care what the joined dim is called."""
    keywords(call)
    values = e.operands(call, len(call.args))
    demand(call, len({value.dims[:-1] for value in values}) == 1, "the operands lie differently")
    for dim in e.program.dims:
        if e.ops.has("concat", [value.name for value in values], {"as": dim.name}):
            return e.take(call, "concat", values, {"as": dim.name})[0]
    raise wrong(call, "the IR joins no such values that are not joined yet")


def split(e: Expressions, call: ast.Call) -> Seen:
    """Nor what the parts are called."""
    keywords(call)
    (x,) = e.operands(ast.Call(call.func, call.args[:1], []), 1)
    sizes = [literal(node) for node in call.args[1:]]
    for op in walk(e.program.region.body):
        alike = op.kind == "split" and sizes == [e.program.size(part) for part in op.names("parts")]
        if alike and e.ops.has("split", [x.name], dict(op.attrs)):
            return e.take(call, "split", [x], dict(op.attrs))
    raise wrong(call, f"the IR splits no such value into {sizes} here that is not split yet")
