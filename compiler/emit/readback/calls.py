"""Reads expressions of emitted `forward`s: each call is the IR op that it does.

Purpose: Python names are followed to IR values, and tensor dims to named dims, so that a wrong operand, axis, dim or
view is seen.  Non-goals: statements (`forward`).
"""

import ast
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import cast

from attrs import define, evolve

from ...certificate import trusted
from ...ir import Attr, Op, Program, Type, walk
from ...placements import COERCIONS, coercion_of
from .text import DTYPES, Names, Ops, demand, keywords, literal, number, terms, wrong
from .values import Axes, Local, Seen, Table, ends_of, local

Gather = tuple[str, frozenset[tuple[str, Attr]]]
"""What a coercion leads from, and its attributes."""


@define
class Expressions:
    """What a body's expressions are read with: `held` are the attributes of `self`."""

    program: Program
    types: dict[str, Type]
    again: "Counter[Gather]"  # how often backward does a forward coercion once more
    names: Names
    ops: Ops
    held: dict[str, Seen]
    env: dict[str, Seen]
    read: set[str]  # attributes of `self` that were read
    closed: set[str]  # gathered values whose block was left

    def value(self, node: ast.expr) -> Seen:
        """What an expression gives; takes the ops that it does."""
        match node:
            case ast.Name(id=name) if name in self.env:
                return self._variable(node, self.env[name])
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self.held:
                self.read.add(name)
                return self.held[name]
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()) if (by := number(node.right)) is not None:
                kind = "scale" if isinstance(node.op, ast.Mult) else "shift"
                return self._by(node, kind, self.tensor(node.left), -by if isinstance(node.op, ast.Sub) else by)
            case ast.UnaryOp(op=ast.USub()):
                return self._by(node, "scale", self.tensor(node.operand), -1.0)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self._aligned(node, "add", [self._term(*term) for term in terms(node)])
            case ast.BinOp(op=ast.Mult()):
                return self._aligned(node, "mul", [self.tensor(node.left), self.tensor(node.right)])
            case ast.BinOp(op=ast.Div()):
                return self._aligned(node, "div", [self.tensor(node.left), self.tensor(node.right)])
            case ast.Call(func=ast.Attribute(ast.Name(id=module), name)) if (function := f"{module}:{name}") in trusted(
                self.program
            ):
                self.names.demand(node, module)
                return _user(self, node, function)
            case ast.Call(func=ast.Attribute(value=viewed, attr=view), keywords=[]) if view in VIEWS:
                return VIEWS[view](self, node, self.tensor(viewed))
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                self.names.demand(node, name)
                return CALLS[name](self, node)
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")

    def _variable(self, node: ast.Name, value: Seen) -> Seen:
        demand(
            node, not (isinstance(value, Local) and value.name in self.closed), f"`{node.id}` is read outside its block"
        )
        return value

    def _by(self, node: ast.expr, kind: str, x: Local, by: float) -> Local:
        """A product or sum with a number."""
        (result,) = self.take(node, kind, [x], {"by": by})
        return Local(result.name, x.groups)

    def _term(self, node: ast.expr, away: bool) -> Local:
        """An operand of a sum."""
        value = self.tensor(node)
        return self._by(node, "scale", value, -1.0) if away else value

    def _aligned(self, node: ast.expr, kind: str, values: list[Local]) -> Local:
        """Sums and products: torch aligns operands at their last dims, and repeats them over dims of size one."""
        (result,) = self.take(node, kind, values, {})
        for value in values:
            tail = result.groups[len(result.groups) - len(value.groups) :]
            fits = all(own in ((), full) for own, full in zip(value.groups, tail, strict=True))
            demand(node, fits, f"torch does not align {value.groups} with {result.groups} so")
        return result

    def tensor(self, node: ast.expr) -> Local:
        """The tensor that an expression gives."""
        value = self.value(node)
        if not isinstance(value, Local):
            raise wrong(node, f"`{ast.unparse(node)}` is no tensor")
        return value

    def plain(self, node: ast.expr) -> Local:
        """The tensor that an expression gives, no dims of which are joined."""
        value = self.tensor(node)
        demand(node, all(len(group) == 1 for group in value.groups), f"`{ast.unparse(node)}` has joined or added dims")
        return value

    def group(self, node: ast.expr) -> tuple[str, ...]:
        """The axes of a group of ranks."""
        value = self.value(node)
        if not isinstance(value, Axes):
            raise wrong(node, f"`{ast.unparse(node)}` is no axis")
        return value.names

    def operands(self, call: ast.Call, count: int) -> list[Local]:
        """The arguments of a call that takes `count` tensors and no more."""
        demand(call, len(call.args) == count, f"{len(call.args)} arguments, not {count}")
        return [self.plain(node) for node in call.args]

    def take(self, node: ast.AST, kind: str, operands: Sequence[Local], attrs: dict[str, Attr]) -> tuple[Local, ...]:
        """Takes an op of the IR; its results."""
        op = self.ops.take(node, kind, [operand.name for operand in operands], attrs)
        return tuple(self.local(value.name) for value in op.outputs)

    def local(self, name: str) -> Local:
        """The first value that is the same as `name`."""
        return local(self.ops.first(name), self.types)

    def sizes(self, value: Local, dims: Sequence[str]) -> tuple[int, ...]:
        """How much of `dims` one rank holds of a value."""
        return tuple(self.program.local_size(self.types[value.name], dim) for dim in dims)


# ---- views


def _flatten(e: Expressions, call: ast.Call, x: Local) -> Local:
    """Joins a range of dims."""
    first, last = (*(literal(node) for node in call.args), -1)[:2]
    demand(call, isinstance(first, int) and isinstance(last, int), "flattens no range of dims")
    start, end = (int(str(i)) % len(x.groups) for i in (first, last))
    joined = tuple(dim for group in x.groups[start : end + 1] for dim in group)
    demand(call, len(call.args) <= 2 and bool(joined), "flattens no range of dims")
    return Local(x.name, (*x.groups[:start], joined, *x.groups[end + 1 :]))


def _unflatten(e: Expressions, call: ast.Call, x: Local) -> Local:
    """Takes the last dim, joined of several, apart again."""
    sizes = e.sizes(x, x.groups[-1])
    demand(call, [literal(node) for node in call.args] == [-1, sizes], f"{x.groups[-1]} are {sizes} here")
    return Local(x.name, (*x.groups[:-1], *((dim,) for dim in x.groups[-1])))


def _unsqueeze(e: Expressions, call: ast.Call, x: Local) -> Local:
    """A dim of size one."""
    at = [literal(node) for node in call.args]
    match at:
        case [int(place)] if 0 <= place <= len(x.groups):
            return Local(x.name, (*x.groups[:place], (), *x.groups[place:]))
        case _:
            raise wrong(call, "adds no dim")


def _summed(e: Expressions, call: ast.Call, x: Local) -> Local:
    """Over the dims that are counted."""
    demand(call, len(call.args) == 1, "sums over one dim or a tuple of them")
    return e.take(call, "sum", [x], {"over": _counted(call.args[0], x)})[0]


def _counted(node: ast.expr, x: Local) -> tuple[str, ...]:
    """The names of dims by their places."""
    value = literal(node)
    places = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
    found = [x.dims[at] for at in places if isinstance(at, int) and 0 <= at < len(x.dims)]
    plain = len(found) == len(places) and len(x.dims) == len(x.groups)
    demand(node, plain, f"`{ast.unparse(node)}` are not dims of {x.groups}")
    return tuple(found)


# ---- calls


def _linear(e: Expressions, call: ast.Call) -> Local:
    demand(call, len(call.args) == 2, "linear takes two operands")
    keywords(call)
    x, w = (e.tensor(node) for node in call.args)
    demand(
        call,
        len(w.groups) == 2 and x.groups[-1] == w.groups[-1],
        f"contracts {x.groups[-1:]} with {w.groups[-1:]} of a weight of {w.groups}",
    )
    (y,) = e.take(call, "contract", [x, w], {"over": x.groups[-1]})
    groups = (*x.groups[:-1], *w.groups[:1])
    demand(call, tuple(dim for group in groups for dim in group) == y.dims, f"the IR has {y.dims}, this is {groups}")
    return Local(y.name, groups)


def _norm(kind: str, *counts: int) -> Callable[[Expressions, ast.Call], Seen]:
    """A norm of so many operands: x, weight, and what else there may be."""

    def read(e: Expressions, call: ast.Call) -> Local:
        demand(call, len(call.args) in counts, f"{len(call.args)} operands")
        x, weight, *rest = values = e.operands(call, len(call.args))
        demand(call, x.dims[-len(weight.dims) :] == weight.dims, f"normalises {weight.dims} of {x.dims}")
        lacks = x.dims[: -len(weight.dims)] if kind == "rms_scaled" else weight.dims
        demand(call, all(other.dims == lacks for other in rest), "the operands lie differently")
        eps = _number(call, literal(keywords(call, "eps")["eps"]))
        return e.take(call, kind, values, {"eps": eps})[0]

    return read


def _mean(kind: str) -> Callable[[Expressions, ast.Call], Seen]:
    """A mean over counted dims, divided by their global sizes."""

    def read(e: Expressions, call: ast.Call) -> Local:
        (x,), given = e.operands(call, 1), keywords(call, "dim", "size")
        over = _counted(given["dim"], x)
        size = prod(e.program.size(dim) for dim in over)
        demand(call, literal(given["size"]) == size, f"{over} are {size}, not {ast.unparse(given['size'])}")
        return e.take(call, kind, [x], {"over": over})[0]

    return read


def _softmax(e: Expressions, call: ast.Call) -> Local:
    (x,) = e.operands(call, 1)
    return e.take(call, "softmax", [x], {"over": _counted(keywords(call, "dim")["dim"], x)})[0]


def _concat(e: Expressions, call: ast.Call) -> Local:
    """Torch does not care what the joined dim is called."""
    keywords(call)
    values = e.operands(call, len(call.args))
    demand(call, len({value.dims[:-1] for value in values}) == 1, "the operands lie differently")
    for dim in e.program.dims:
        if e.ops.has("concat", [value.name for value in values], {"as": dim.name}):
            return e.take(call, "concat", values, {"as": dim.name})[0]
    raise wrong(call, "the IR joins no such values that are not joined yet")


def _number(node: ast.AST, value: object) -> float:
    if not isinstance(value, float):
        raise wrong(node, f"{value!r} is no number")
    return value


def _rope(e: Expressions, call: ast.Call) -> Local:
    demand(call, len(call.args) == 2, "rope takes an operand and a table")
    keywords(call)
    x, table = e.plain(call.args[0]), e.value(call.args[1])
    if not isinstance(table, Table):
        raise wrong(call, "rope turns by a table")
    seq, width = e.sizes(x, ("seq", x.dims[-1]))
    between, dtype = len(x.dims) - x.dims.index("seq") - 2, DTYPES[e.types[x.name].dtype]
    needed = evolve(table, seq=seq, between=between, dtype=dtype)
    demand(call, table == needed and table.dim <= width, f"the table is {table}, not {needed}")
    part: dict[str, Attr] = {"dims": float(table.dim)} if table.dim < width else {}
    return e.take(call, "rope", [x], {"theta": table.theta, **part, **dict(table.scaling)})[0]


def _attention(e: Expressions, call: ast.Call) -> Local:
    """The runtime's attention takes [seq, batch, heads, head_dim] or with the first two swapped."""
    q, k, v = e.operands(call, 3)
    demand(
        call,
        k.dims == v.dims and q.dims[:2] == k.dims[:2] and len(q.dims) == 4,
        f"attention of {q.dims}, {k.dims}, {v.dims}",
    )
    given = {str(keyword.arg): literal(keyword.value) for keyword in call.keywords}
    seq = given.pop("seq", None)
    demand(call, q.dims[:2].index("seq") == seq, f"seq={seq}, but the dims are {q.dims}")
    heads, kv_heads = (e.sizes(value, value.dims[2:3])[0] for value in (q, k))
    whole = heads * e.program.size(k.dims[2]) == kv_heads * e.program.size(q.dims[2])
    demand(
        call, whole or kv_heads == 1, f"{heads} of the heads and {kv_heads} of the kv heads are no part of the whole"
    )
    return e.take(call, "attention", [q, k, v], _attention_attributes(call, given))[0]


def _attention_attributes(call: ast.Call, given: dict[str, object]) -> dict[str, Attr]:
    """The IR's attributes for the options of the runtime's attention."""
    attrs: dict[str, Attr] = {"mask": "causal" if given.pop("causal", True) is True else "full"}
    for key, value in given.items():
        demand(call, key in ("window", "scale", "softcap"), f"attention has no option {key}")
        demand(call, isinstance(value, int if key == "window" else float), f"{key} = {value!r}")
        attrs[key] = float(str(value))
    return attrs


def _user(e: Expressions, call: ast.Call, function: str) -> Local:
    """A function of the user's own, of tensors and then numbers; the IR knows what else was said of it."""
    keywords(call)
    numbers = [number(node) for node in call.args]
    count = numbers.count(None)
    operands = e.operands(ast.Call(call.func, call.args[:count], []), count)
    names, given = [operand.name for operand in operands], tuple(map(repr, numbers[count:]))
    for op in walk(e.program.region.body):
        alike = op.kind == "call" and (op.get("function"), op.get("constants")) == (function, given)
        if alike and e.ops.has("call", names, dict(op.attrs)):
            return e.take(call, "call", operands, dict(op.attrs))[0]
    raise wrong(call, f"the IR has no call of {function} of {', '.join(names)} here that is not done yet")


def _embedding(e: Expressions, call: ast.Call) -> Local:
    tokens, table = (e.plain(node) for node in call.args[:2])
    _classes(e, call, 2, e.types[table.name].axes_of(table.dims[0]))
    return e.take(call, "embedding", [tokens, table], {})[0]


def _softmax_parts(e: Expressions, call: ast.Call) -> tuple[Local, ...]:
    logits, peak, labels = values = [e.plain(node) for node in call.args[:3]]
    demand(call, logits.dims[:-1] == peak.dims == labels.dims, "the operands' tokens lie differently")
    call, attrs = _split(call, "smoothing")
    _classes(e, call, 3, e.types[logits.name].axes_of(logits.dims[-1]), logits)
    return e.take(call, "softmax_parts", values, attrs)


def _max_logit(e: Expressions, call: ast.Call) -> Local:
    logits = e.plain(call.args[0]) if call.args else None
    if logits is None:
        raise wrong(call, "max_logit takes logits")
    dim = logits.dims[-1]
    padded = e.program.valid(dim) < e.program.size(dim)
    _classes(e, call, 1, e.types[logits.name].axes_of(dim) if padded else (), logits)
    return e.take(call, "max_logit", [logits], {})[0]


def _classes(e: Expressions, call: ast.Call, count: int, axes: tuple[str, ...], logits: Local | None = None) -> None:
    """After its operands, a call is told the axes over which the vocabulary lies, if any, and what of it is padding."""
    dim = logits.dims[-1] if logits else ""
    padded = bool(dim) and e.program.valid(dim) < e.program.size(dim)
    given = {name: literal(node) for name, node in keywords(call, *(["classes"] if padded else [])).items()}
    demand(call, given == ({"classes": e.program.valid(dim)} if padded else {}), "the vocabulary's padding is another")
    given = [e.group(node) for node in call.args[count:]]
    demand(call, given == ([axes] if axes else []), f"the vocabulary lies over {axes}, not {given}")


def _cross_entropy(e: Expressions, call: ast.Call) -> Local:
    logits, labels = values = e.operands(call, 2)
    demand(call, logits.dims[:-1] == labels.dims, "the operands' tokens lie differently")
    call, attrs = _split(call, "smoothing", "z")
    _classes(e, call, 2, (), logits)
    return e.take(call, "cross_entropy", values, attrs)[0]


def _token_loss(e: Expressions, call: ast.Call) -> Local:
    """With a z-loss its operands are one more."""
    rest, attrs = _split(call, "z_loss")
    keywords(rest)
    values = e.operands(call, 4 if attrs else 3)
    demand(call, len({value.dims for value in values}) == 1, "the operands lie differently")
    return e.take(call, "token_loss", values, attrs)[0]


def _split(call: ast.Call, *numbers: str) -> tuple[ast.Call, dict[str, Attr]]:
    """A call without those of its keywords that may be given numbers, and these numbers."""
    given = {str(k.arg): _number(call, literal(k.value)) for k in call.keywords if k.arg in numbers}
    rest = [keyword for keyword in call.keywords if keyword.arg not in numbers]
    demand(call, len(rest) + len(given) == len(call.keywords), "a keyword is given twice")
    return ast.copy_location(ast.Call(call.func, call.args, rest), call), {**given}


def _function(name: str, *attributes: str) -> Callable[[Expressions, ast.Call], Seen]:
    """An elementwise function of one operand, its attributes as keywords; groups of joined dims stay joined."""

    def read(e: Expressions, call: ast.Call) -> Local:
        demand(call, len(call.args) == 1, f"{name} takes one operand")
        given = {str(keyword.arg): _attribute(keyword.value) for keyword in call.keywords}
        demand(call, {*given} <= {*attributes}, f"{name} has no such option")  # one at its default is not written
        x = e.tensor(call.args[0])
        return Local(e.take(call, name, [x], given)[0].name, x.groups)

    return read


def _attribute(node: ast.expr) -> Attr:
    value = literal(node)
    if not isinstance(value, str | float):
        raise wrong(node, f"{value!r} is no number or word")
    return value


# ---- coercions


def coerced(e: Expressions, call: ast.Call, function: str, again: bool = False) -> Local:
    """A coercion by the runtime's `function`; `again` says whether backward gathers once more."""
    demand(call, len(call.args) == 2, "a coercion takes an operand and an axis")
    x, axes = e.plain(call.args[0]), e.group(call.args[1])
    options = {str(keyword.arg): literal(keyword.value) for keyword in call.keywords}
    for source, target in ends_of(function, x, options):
        attrs: dict[str, Attr] = {"axes": axes, "from": source, "to": target}
        if e.ops.has("coerce", [x.name], attrs):
            op = e.ops.take(call, "coerce", [x.name], attrs)
            _demand_once(e, call, op, again)
            return e.local(op.outputs[0].name)
    raise wrong(call, f"the IR has no such coercion of {x.name} over {axes} that is not done yet")


def _demand_once(e: Expressions, call: ast.Call, op: Op, again: bool) -> None:
    if coercion_of(op).function == "all_gather":
        count = e.again[op.inputs[0], frozenset(op.attrs)]
        demand(call, count == again, f"in the IR, backward gathers {op.outputs[0].name} again {count} times")


VIEWS: dict[str, Callable[[Expressions, ast.Call, Local], Local]] = {
    "flatten": _flatten,
    "sum": _summed,
    "unflatten": _unflatten,
    "unsqueeze": _unsqueeze,
}


def _coercion(function: str) -> Callable[[Expressions, ast.Call], Seen]:
    return lambda e, call: coerced(e, call, function)


CALLS: dict[str, Callable[[Expressions, ast.Call], Seen]] = {
    "attention": _attention,
    "concat": _concat,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "layer_norm": _norm("layernorm", 2, 3),
    "linear": _linear,
    "max_logit": _max_logit,
    "mean": _mean("mean"),
    "mean_square": _mean("mean_square"),
    "rms_norm": _norm("rmsnorm", 2),
    "rms_scaled": _norm("rms_scaled", 3),
    "rope": _rope,
    **{name: _function(name) for name in ("exp", "relu", "sigmoid", "silu", "tanh")},
    "gelu": _function("gelu", "approximate"),
    "softcap": _function("softcap", "cap"),
    "softmax": _softmax,
    "softmax_parts": _softmax_parts,
    "token_loss": _token_loss,
    **{entry.function: _coercion(entry.function) for entry in COERCIONS.values()},
}
"""What an emitted `forward` may call, but for views and blocks."""
