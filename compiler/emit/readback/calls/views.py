"""Reads views: dims joined, taken apart and added."""

import ast

from ..ast_matching import demand, literal, wrong
from ..expressions import Expressions
from ..values import Local


def flatten(e: Expressions, call: ast.Call, x: Local) -> Local:
    """Joins a range of dims."""
    first, last = (*(literal(node) for node in call.args), -1)[:2]
    demand(call, isinstance(first, int) and isinstance(last, int), "flattens no range of dims")
    start, end = (int(str(i)) % len(x.groups) for i in (first, last))
    joined = tuple(dim for group in x.groups[start : end + 1] for dim in group)
    demand(call, len(call.args) <= 2 and bool(joined), "flattens no range of dims")
    return Local(x.name, (*x.groups[:start], joined, *x.groups[end + 1 :]))


def unflatten(e: Expressions, call: ast.Call, x: Local) -> Local:
    """Takes the last dim, joined of several, apart again."""
    sizes = e.sizes(x, x.groups[-1])
    demand(call, [literal(node) for node in call.args] == [-1, sizes], f"{x.groups[-1]} are {sizes} here")
    return Local(x.name, (*x.groups[:-1], *((dim,) for dim in x.groups[-1])))


def unsqueeze(e: Expressions, call: ast.Call, x: Local) -> Local:
    """A dim of size one."""
    at = [literal(node) for node in call.args]
    match at:
        case [int(place)] if 0 <= place <= len(x.groups):
            return Local(x.name, (*x.groups[:place], (), *x.groups[place:]))
        case _:
            raise wrong(call, "adds no dim")
