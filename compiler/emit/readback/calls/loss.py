"""Reads losses, of a whole vocabulary and of parts."""

import ast

from ....ir import Attr
from ..ast_matching import demand, keywords, real, wrong
from ..expressions import Expressions
from ..values import Local
from .vocabulary import classes


def cross_entropy(e: Expressions, call: ast.Call) -> Local:
    """Of whole logits."""
    logits, labels = values = e.operands(call, 2)
    demand(call, logits.dims[:-1] == labels.dims, "the operands' tokens lie differently")
    call, attrs = split_numbers(call, "smoothing", "z", "cap")
    classes(e, call, 2, (), logits)
    return e.take(call, "cross_entropy", values, attrs)[0]


def local_softmax_stats(e: Expressions, call: ast.Call) -> tuple[Local, ...]:
    """Of a part of the vocabulary: the sum of its exponents, and the logit of the label."""
    logits, peak, labels = values = [e.plain(node) for node in call.args[:3]]
    demand(call, logits.dims[:-1] == peak.dims == labels.dims, "the operands' tokens lie differently")
    call, attrs = split_numbers(call, "smoothing")
    classes(e, call, 3, e.types[logits.name].axes_of(logits.dims[-1]), logits)
    return e.take(call, "local_softmax_stats", values, attrs)


def max_logit(e: Expressions, call: ast.Call) -> Local:
    """Told of the vocabulary only where a part of it is padding."""
    logits = e.plain(call.args[0]) if call.args else None
    if logits is None:
        raise wrong(call, "max_logit takes logits")
    dim = logits.dims[-1]
    padded = e.program.valid(dim) < e.program.size(dim)
    classes(e, call, 1, e.types[logits.name].axes_of(dim) if padded else (), logits)
    return e.take(call, "max_logit", [logits], {})[0]


def token_loss(e: Expressions, call: ast.Call) -> Local:
    """With a z-loss its operands are one more."""
    rest, attrs = split_numbers(call, "z_loss")
    keywords(rest)
    values = e.operands(call, 4 if attrs else 3)
    demand(call, len({value.dims for value in values}) == 1, "the operands lie differently")
    return e.take(call, "token_loss", values, attrs)[0]


def split_numbers(call: ast.Call, *numbers: str) -> tuple[ast.Call, dict[str, Attr]]:
    """A call without those of its keywords that may be given numbers, and these numbers."""
    given = {str(k.arg): real(k.value) for k in call.keywords if k.arg in numbers}
    rest = [keyword for keyword in call.keywords if keyword.arg not in numbers]
    demand(call, len(rest) + len(given) == len(call.keywords), "a keyword is given twice")
    return ast.copy_location(ast.Call(call.func, call.args, rest), call), {**given}
