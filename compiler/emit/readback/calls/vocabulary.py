"""Reads what a call is told of the vocabulary: the axes over which it lies, and its padding."""

import ast

from ..ast_matching import demand, keywords, literal
from ..expressions import Expressions
from ..values import Local


def classes(e: Expressions, call: ast.Call, count: int, axes: tuple[str, ...], logits: Local | None = None) -> None:
    """After its operands, a call is told the axes over which the vocabulary lies, if any, and what of it is padding."""
    classes_named(e, call, count, axes, logits.dims[-1] if logits else "")


def classes_named(e: Expressions, call: ast.Call, count: int, axes: tuple[str, ...], dim: str) -> None:
    """The same by the name of the vocabulary's dim; "" for one without padding."""
    padded = bool(dim) and e.program.valid(dim) < e.program.size(dim)
    given = {name: literal(node) for name, node in keywords(call, *(["classes"] if padded else [])).items()}
    demand(call, given == ({"classes": e.program.valid(dim)} if padded else {}), "the vocabulary's padding is another")
    given = [e.group(node) for node in call.args[count:]]
    demand(call, given == ([axes] if axes else []), f"the vocabulary lies over {axes}, not {given}")
