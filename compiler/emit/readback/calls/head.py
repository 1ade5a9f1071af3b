"""Reads the last product with its loss, and losses in parts."""

import ast

from ....ir import Attr, Kind
from ..ast_matching import demand, literal
from ..expressions import Expressions
from ..values import Local, Seen
from .loss import split_numbers
from .vocabulary import classes, classes_named


def linear_cross_entropy(e: Expressions, call: ast.Call) -> Local:
    """Of a whole vocabulary."""
    rest, values, attrs = _operands(e, call)
    classes_named(e, rest, 3, (), values[1].dims[0])
    return e.take(call, "linear_cross_entropy", values, attrs)[0]


def linear_softmax_stats(e: Expressions, call: ast.Call) -> Seen:
    """Of a part of it; the shares of all ranks have a dim of their own."""
    rest, values, attrs = _operands(e, call)
    dim, type = values[1].dims[0], e.types[values[1].name]
    classes_named(e, rest, 3, type.axes_of(dim), dim)
    return _of_shares(e, call, "linear_softmax_stats", values, attrs)


def logit_softmax_stats(e: Expressions, call: ast.Call) -> Seen:
    """Of a part of it, of logits that are there."""
    logits, labels = values = [e.plain(node) for node in call.args[:2]]
    demand(call, logits.dims[:-1] == labels.dims, "the operands' tokens lie differently")
    rest, attrs = split_numbers(call, "smoothing", "cap")
    classes(e, rest, 2, e.types[logits.name].axes_of(logits.dims[-1]), logits)
    return _of_shares(e, call, "logit_softmax_stats", values, attrs)


def _of_shares(e: Expressions, call: ast.Call, kind: str, values: list[Local], attrs: dict[str, Attr]) -> Seen:
    """The op, whose dim of shares the call does not name."""
    operands = [value.name for value in values]
    able = (dim.name for dim in e.program.dims if e.ops.has(kind, operands, attrs | {"as": dim.name}))
    return e.take(call, kind, values, attrs | {"as": next(able, "")})


def _operands(e: Expressions, call: ast.Call) -> tuple[ast.Call, list[Local], dict[str, Attr]]:
    """The call without what is read here: the value, the weight, the labels, and a bias, if there is one; what is
    contracted, and what numbers are given.
    """
    biases = [e.plain(keyword.value) for keyword in call.keywords if keyword.arg == "bias"]
    x, weight, labels = values = [e.plain(node) for node in call.args[:3]]
    over = weight.dims[1:]
    demand(call, x.dims[-len(over) :] == over, f"contracts {over} of {x.dims}")
    demand(call, x.dims[: -len(over)] == labels.dims, "the operands' tokens lie differently")
    demand(call, all(each.dims == weight.dims[:1] for each in biases), "the bias is not one of the classes")
    rest, attrs = split_numbers(call, "smoothing", "z", "cap")
    without = [keyword for keyword in rest.keywords if keyword.arg != "bias"]
    rest = ast.copy_location(ast.Call(rest.func, rest.args, without), call)
    return rest, [*values, *biases], {"inner": over, **attrs}


def rescale_to_global_max(e: Expressions, call: ast.Call) -> Seen:
    """The parts of one rank in terms of the largest logit of all; it is told how many classes a rank has."""
    m, _, t, peak, labels = values = [e.plain(node) for node in call.args[:5]]
    demand(call, m.dims == t.dims == peak.dims == labels.dims, "the operands lie differently")
    rest, attrs = split_numbers(call, "smoothing")
    axes = e.types[m.name].axes_in(Kind.MAXIMUM)
    columns = [literal(keyword.value) for keyword in rest.keywords if keyword.arg == "columns"]
    able = (dim.name for dim in e.program.dims if columns == [dim.size // e.program.degree(axes)])
    operands = [value.name for value in values]
    found = [dim for dim in able if e.ops.has("rescale_to_global_max", operands, {**attrs, "classes": dim})]
    demand(call, len(found) == 1, "the IR rejoins no such parts here")
    without = [keyword for keyword in rest.keywords if keyword.arg != "columns"]
    classes_named(e, ast.copy_location(ast.Call(rest.func, rest.args, without), call), 5, axes, found[0])
    return e.take(call, "rescale_to_global_max", values, {**attrs, "classes": found[0]})
