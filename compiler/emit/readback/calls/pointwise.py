"""Reads elementwise functions."""

import ast

from ....ir import Attr
from ....ops import OpDef
from ..ast_matching import demand, literal, wrong
from ..expressions import Expressions, Reader
from ..values import Local


def elementwise(entry: OpDef) -> Reader:
    """An elementwise op, its attributes as keywords; groups of joined dims stay joined."""
    known = {attribute.name for attribute in entry.attributes}

    def read(e: Expressions, call: ast.Call) -> Local:
        demand(call, len(call.args) == len(entry.operands), f"{entry.name} takes {len(entry.operands)} operands")
        given = {str(keyword.arg): _attribute(keyword.value) for keyword in call.keywords}
        demand(call, {*given} <= known, f"{entry.name} has no such option")  # one at its default is not written
        values = [e.tensor(node) for node in call.args]
        demand(call, len({value.groups for value in values}) == 1, "the operands lie differently")
        return Local(e.take(call, entry.name, values, given)[0].name, values[0].groups)

    return read


def _attribute(node: ast.expr) -> Attr:
    """A number or a word."""
    value = literal(node)
    if not isinstance(value, str | float):
        raise wrong(node, f"{value!r} is no number or word")
    return value
