"""Reads calls that do the work of several ops."""

import ast
from typing import cast

from ....ir import Attr
from ..ast_matching import demand, keywords, literal, real
from ..expressions import Expressions, Reader
from ..values import Seen
from .algebra import contracted


def add_norm(kind: str, *counts: int) -> Reader:
    """A sum of two values and its norm, of so many operands."""

    def read(e: Expressions, call: ast.Call) -> Seen:
        demand(call, len(call.args) in counts, f"{len(call.args)} operands")
        x, y, weight, *rest = values = e.operands(call, len(call.args))
        demand(call, x.dims == y.dims, "adds values that lie differently")
        demand(call, x.dims[-len(weight.dims) :] == weight.dims, f"normalises {weight.dims} of {x.dims}")
        demand(call, all(other.dims == weight.dims for other in rest), "the operands lie differently")
        return e.take(call, kind, values, {"eps": real(keywords(call, "eps")["eps"])})

    return read


def fused_linear(e: Expressions, call: ast.Call) -> Seen:
    """Contractions of one value, whose results are unflattened `into` the weights' own dims."""
    demand(call, len(call.args) > 2, "fused_linear takes a value and several weights")
    x, *weights = (e.tensor(node) for node in call.args)
    given = {str(keyword.arg): literal(keyword.value) for keyword in call.keywords}
    demand(call, {*given} <= {"into", "apart"}, "fused_linear has no such option")
    over = {contracted(call, x, w) for w in weights}
    demand(call, len(over) == 1, "the weights are contracted over different dims")
    into = tuple(e.sizes(w, w.groups[0]) for w in weights)
    several = any(len(sizes) > 1 for sizes in into)
    demand(call, given.get("into") == (into if several else None), f"the weights have {into}")
    attrs: dict[str, Attr] = {"over": over.pop()}
    if apart := given.get("apart"):
        demand(call, isinstance(apart, tuple), "`apart` is no tuple")
        attrs["apart"] = tuple(map(str, cast(tuple[object, ...], apart)))
    results = e.take(call, "contracts", [x, *weights], attrs)
    for y, w in zip(results, weights, strict=True):
        dims = (*(dim for group in x.groups[:-1] for dim in group), *w.groups[0])
        demand(call, dims == y.dims, f"the IR has {y.dims}, this is {dims}")
    return results
