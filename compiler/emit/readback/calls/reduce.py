"""Reads sums and means over dims, and softmax."""

import ast
from math import prod
from typing import cast

from ..ast_matching import demand, keywords, literal
from ..expressions import Expressions, Reader
from ..values import Local


def mean(kind: str) -> Reader:
    """A mean over counted dims, divided by their global sizes."""

    def read(e: Expressions, call: ast.Call) -> Local:
        (x,), given = e.operands(call, 1), keywords(call, "dim", "size")
        over = _counted(given["dim"], x)
        size = prod(e.program.size(dim) for dim in over)
        demand(call, literal(given["size"]) == size, f"{over} are {size}, not {ast.unparse(given['size'])}")
        return e.take(call, kind, [x], {"over": over})[0]

    return read


def over(kind: str) -> Reader:
    """A sum or a softmax over counted dims."""

    def read(e: Expressions, call: ast.Call) -> Local:
        (x,) = e.operands(call, 1)
        return e.take(call, kind, [x], {"over": _counted(keywords(call, "dim")["dim"], x)})[0]

    return read


def _counted(node: ast.expr, x: Local) -> tuple[str, ...]:
    """The names of dims by their places."""
    value = literal(node)
    places = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
    found = [x.dims[at] for at in places if isinstance(at, int) and 0 <= at < len(x.dims)]
    plain = len(found) == len(places) and len(x.dims) == len(x.groups)
    demand(node, plain, f"`{ast.unparse(node)}` are not dims of {x.groups}")
    return tuple(found)
