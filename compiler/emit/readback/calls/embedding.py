"""Reads embeddings."""

import ast

from ..expressions import Expressions
from ..values import Local
from .vocabulary import classes


def embedding(e: Expressions, call: ast.Call) -> Local:
    """Rows of a table by tokens."""
    tokens, table = (e.plain(node) for node in call.args[:2])
    classes(e, call, 2, e.types[table.name].axes_of(table.dims[0]))
    return e.take(call, "embedding", [tokens, table], {})[0]
