"""Reads dropout, and the draws of each iteration of a repeat."""

import ast

from ....ir import Attr
from ..ast_matching import demand, keywords, literal, real, wrong
from ..expressions import Expressions
from ..values import Local


def dropout(e: Expressions, call: ast.Call) -> Local:
    """Told where samples lie, and which axes shard other dims, so that it knows each element's place."""
    x, draws = e.operands(call, 2)
    given = {str(keyword.arg): keyword.value for keyword in call.keywords}
    split = _split(e, given.pop("split", None))
    type = e.types[x.name]
    held = {i: type.axes_of(dim) for i, dim in enumerate(x.dims) if dim != "batch" and type.axes_of(dim)}
    demand(call, split == held, f"the operand is split {held}, not {split}")
    demand(call, sorted(given) == ["batch", "p", "site"] and len(call.keywords) <= 4, f"options {sorted(given)}")
    demand(call, literal(given["batch"]) == x.dims.index("batch"), "samples lie along another dim")
    return e.take(call, "dropout", [x, draws], {"p": real(given["p"]), "site": number_of(given["site"])})[0]


def _split(e: Expressions, node: ast.expr | None) -> dict[object, tuple[str, ...]]:
    """The axes by dim."""
    match node:
        case None:
            return {}
        case ast.Dict(keys=keys, values=values):
            return {literal(key): e.group(value) for key, value in zip(keys, values, strict=True) if key}
        case _:
            raise wrong(node, "is no dict of axes by dim")


def number_of(node: ast.expr) -> int:
    """A dropout's number among those of the model."""
    value = literal(node)
    if type(value) is not int:
        raise wrong(node, f"{value!r} counts nothing")
    return value


def fork(e: Expressions, call: ast.Call) -> Local:
    """Draws for a repeat of so many iterations."""
    keywords(call)
    demand(call, len(call.args) == 2, "fork takes draws and a count")
    draws, count = e.plain(call.args[0]), literal(call.args[1])
    for dim in e.program.dims:
        attrs: dict[str, Attr] = {"repeat": dim.name}
        if dim.size == count and e.ops.has("fork", [draws.name], attrs):
            return e.take(call, "fork", [draws], attrs)[0]
    raise wrong(call, f"the IR draws for no repeat of {count} here that is not drawn for yet")
