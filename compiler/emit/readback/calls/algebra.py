"""Reads contractions."""

import ast

from ..ast_matching import demand, keywords
from ..expressions import Expressions
from ..values import Local


def contracted(call: ast.Call, x: Local, w: Local) -> tuple[str, ...]:
    """The dims, joined, over which a value and a weight of at most one group of dims besides are contracted."""
    demand(
        call,
        len(w.groups) == 2 and x.groups[-1] == w.groups[-1],
        f"contracts {x.groups[-1:]} with {w.groups[-1:]} of a weight of {w.groups}",
    )
    return x.groups[-1]


def linear(e: Expressions, call: ast.Call) -> Local:
    """A contraction of the last dims, joined."""
    demand(call, len(call.args) == 2, "linear takes two operands")
    keywords(call)
    x, w = (e.tensor(node) for node in call.args)
    (y,) = e.take(call, "contract", [x, w], {"over": contracted(call, x, w)})
    groups = (*x.groups[:-1], *w.groups[:1])
    demand(call, tuple(dim for group in groups for dim in group) == y.dims, f"the IR has {y.dims}, this is {groups}")
    return Local(y.name, groups)
