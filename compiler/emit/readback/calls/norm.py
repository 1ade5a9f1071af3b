"""Reads norms."""

import ast

from ..ast_matching import demand, keywords, real
from ..expressions import Expressions, Reader
from ..values import Local


def norm(kind: str, *counts: int) -> Reader:
    """A norm of so many operands: x, weight, and what else there may be."""

    def read(e: Expressions, call: ast.Call) -> Local:
        demand(call, len(call.args) in counts, f"{len(call.args)} operands")
        x, weight, *rest = values = e.operands(call, len(call.args))
        demand(call, x.dims[-len(weight.dims) :] == weight.dims, f"normalises {weight.dims} of {x.dims}")
        lacks = x.dims[: -len(weight.dims)] if kind == "rms_scaled" else weight.dims
        demand(call, all(other.dims == lacks for other in rest), "the operands lie differently")
        eps = real(keywords(call, "eps")["eps"])
        return e.take(call, kind, values, {"eps": eps})[0]

    return read
