"""Reads elementwise functions."""

import ast

from ....ir import Attr
from ..ast_matching import demand, literal, wrong
from ..expressions import Expressions, Reader
from ..values import Local


def function(name: str, *attributes: str) -> Reader:
    """An elementwise function of one operand, its attributes as keywords; groups of joined dims stay joined."""

    def read(e: Expressions, call: ast.Call) -> Local:
        demand(call, len(call.args) == 1, f"{name} takes one operand")
        given = {str(keyword.arg): attribute(keyword.value) for keyword in call.keywords}
        demand(call, {*given} <= {*attributes}, f"{name} has no such option")  # one at its default is not written
        x = e.tensor(call.args[0])
        return Local(e.take(call, name, [x], given)[0].name, x.groups)

    return read


def attribute(node: ast.expr) -> Attr:
    """A number or a word."""
    value = literal(node)
    if not isinstance(value, str | float):
        raise wrong(node, f"{value!r} is no number or word")
    return value
