"""Reads rotary positions and attention."""

import ast

from attrs import evolve

from ....ir import Attr
from ..ast_matching import DTYPES, demand, keywords, literal, wrong
from ..expressions import Expressions
from ..values import Local, Table


def rope(e: Expressions, call: ast.Call) -> Local:
    """Turns one value."""
    return _turned(e, call, "rope", 1)[0]


def rope_pair(e: Expressions, call: ast.Call) -> tuple[Local, ...]:
    """Turns queries and keys."""
    return _turned(e, call, "rope_pair", 2)


def _turned(e: Expressions, call: ast.Call, kind: str, count: int) -> tuple[Local, ...]:
    """Turns by a table, which must fit the dims as they lie."""
    demand(call, len(call.args) == count + 1, f"{kind} takes {count} operands and a table")
    keywords(call)
    *values, table = *(e.plain(node) for node in call.args[:-1]), e.value(call.args[-1])
    if not isinstance(table, Table):
        raise wrong(call, f"{kind} turns by a table")
    demand(call, len({(*value.dims[:-2], value.dims[-1]) for value in values}) == 1, "the operands lie differently")
    x = values[0]
    seq, width = e.sizes(x, ("seq", x.dims[-1]))
    between, dtype = len(x.dims) - x.dims.index("seq") - 2, DTYPES[e.types[x.name].dtype]
    needed = evolve(table, seq=seq, between=between, dtype=dtype)
    demand(call, table == needed and table.dim <= width, f"the table is {table}, not {needed}")
    part: dict[str, Attr] = {"dims": float(table.dim)} if table.dim < width else {}
    return e.take(call, kind, values, {"theta": table.theta, **part, **dict(table.scaling)})


def attention(e: Expressions, call: ast.Call) -> Local:
    """The runtime's attention takes [seq, batch, heads, head_dim] or with the first two swapped."""
    q, k, v = e.operands(call, 3)
    demand(
        call,
        k.dims == v.dims and q.dims[:2] == k.dims[:2] and len(q.dims) == 4,
        f"attention of {q.dims}, {k.dims}, {v.dims}",
    )
    documents = [e.plain(keyword.value) for keyword in call.keywords if keyword.arg == "documents"]
    demand(call, all(each.dims == q.dims[:2] for each in documents), "documents lie otherwise than queries")
    draws = [e.plain(keyword.value) for keyword in call.keywords if keyword.arg == "draws"]
    axes = [e.group(keyword.value) for keyword in call.keywords if keyword.arg == "heads"]
    held = e.types[q.name].axes_of(q.dims[2])
    demand(call, axes == ([held] if draws and held else []), f"heads lie over {held}, not {axes}")
    options = [keyword for keyword in call.keywords if keyword.arg not in ("documents", "draws", "heads")]
    given = {str(keyword.arg): literal(keyword.value) for keyword in options}
    seq = given.pop("seq", None)
    demand(call, q.dims[:2].index("seq") == seq, f"seq={seq}, but the dims are {q.dims}")
    heads, kv_heads = (e.sizes(value, value.dims[2:3])[0] for value in (q, k))
    whole = heads * e.program.size(k.dims[2]) == kv_heads * e.program.size(q.dims[2])
    demand(
        call, whole or kv_heads == 1, f"{heads} of the heads and {kv_heads} of the kv heads are no part of the whole"
    )
    return e.take(call, "attention", [q, k, v, *documents, *draws], _attention_attributes(call, given))[0]


def _attention_attributes(call: ast.Call, given: dict[str, object]) -> dict[str, Attr]:
    """The IR's attributes for the options of the runtime's attention."""
    attrs: dict[str, Attr] = {"mask": "causal" if given.pop("causal", True) is True else "full"}
    for key, value in given.items():
        demand(call, key in ("window", "scale", "softcap", "dropout", "site"), f"attention has no option {key}")
        demand(call, isinstance(value, int if key in ("window", "site") else float), f"{key} = {value!r}")
        attrs[key] = int(str(value)) if key == "site" else float(str(value))
    return attrs
