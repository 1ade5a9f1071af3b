"""Reads the expression of an op in a text as torch runs it, on named dims, and compares what it
does with the op.

Purpose: a second opinion on `expressions`.  Each dim of a tensor in the text is one dim of the IR
or several, joined; views, sums, products and calls make tensors of tensors by the rules of torch,
and an index means the dim found there.  Non-goals: which expressions a text has, how often and in
which order (`forward`).
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from attrs import define, frozen

from ...ir import INVARIANT, PRECISIONS, Kind, Op, Placement, Program, Type, sharded
from ...ops import roles
from ...ops.call import (
    Argument,
    Dims,
    Experts,
    Group,
    Keyword,
    Layout,
    PositionIds,
    Positions,
    Quotient,
    RotaryTable,
    Shards,
    Size,
)
from ...ops.saved_tensors import Local
from ..naming import DTYPES
from ..target import Target, mesh_axes, zigzag_ranks
from .machine import Machine
from .terms import Term, demand, frozen_key, wrong

Shape = tuple[tuple[str, ...], ...]
"""For each dim of a tensor the dims of the IR that are joined in it, none for a dim of size 1."""

Values = Sequence[object]


@frozen
class Calls:
    """Compares expressions with ops; `types` are those of all values, `shape` gives the dims of
    a value as stored.
    """

    machine: Machine
    program: Program
    types: Mapping[str, Type]
    shape: Callable[[str], Shape]
    target: Target

    def demand(self, op: Op, value: object, operands: Values) -> None:
        """Raises where `value`, computed from the terms of the operands, is not what the op is."""
        shapes = dict(zip(operands, map(self.shape, op.inputs), strict=True))
        it = Local(self.program, op, tuple(self.types[name] for name in op.inputs))
        node = self.machine.at.get(cast(Term, value), ast.Module([], []))
        Reader(
            self.machine, it, tuple(operands), shapes, self.rotary_table(op), node, self.target
        ).compare(value)

    def rotary_table(self, op: Op) -> object:
        """The table of rotary positions by which an op rotates, if it does: of the sequence and
        the last dim.
        """
        attrs, positions = dict(op.attrs), roles(op, self.types).query_seq
        if "theta" not in attrs:
            return None
        type = self.types[op.inputs[0]]
        width, axes = self.program.local_size(type, type.dims[-1]), type.axes_of(positions)
        theta, dims = attrs.pop("theta"), round(float(str(attrs.pop("dims", width))))
        at = -1 - type.dims[::-1].index(positions)
        given = {"theta": theta, **attrs} | ({"seq_dim": at} if at != -3 else {})
        said = ", ".join(f"{key}={value!r}" for key, value in given.items())
        said = (
            f"{self.program.size(positions)}, {dims}, {said},"
            f" dtype={DTYPES[PRECISIONS[self.program.train.precision]]}"
        )
        return self.machine.spec(f"rope_frequencies({self._placed(said, positions, axes)})")

    def _placed(self, said: str, seq: str, axes: tuple[str, ...]) -> str:
        """The arguments of a table, with those that say which positions a rank has."""
        if self.target.local:
            layout = layout_of(self.program, Positions(seq, axes)) if axes else ""
            positions = f", positions={layout}" if axes else ""
            return f"{said}{positions}, mesh=mesh"
        ranks, split = zigzag_ranks(self.program), sharded(seq)
        each = (
            placed(split if axis in axes else INVARIANT, ((), (seq,)))
            for axis in mesh_axes(self.program)
        )
        return (
            f"mesh, {said},"
            f" placements=[{', '.join(each)}]{f', zigzag={ranks}' if ranks > 1 else ''}"
        )


@define
class Reader:
    """Reads one expression: `shapes` are those of the operands, by their terms."""

    machine: Machine
    it: Local
    operands: tuple[object, ...]
    shapes: Mapping[object, Shape]
    table: object
    node: ast.AST
    target: Target

    def compare(self, value: object) -> None:
        """Raises where an expression is another op, or its results have other dims."""
        found = self._results(value)
        wanted = [self.it.program.joined(result.type) for result in self.it.op.outputs]
        self._demand(found in ([], wanted), f"of dims {', '.join(map(_said, found))}")

    def _demand(self, holds: bool, what: str) -> None:
        op = self.it.op
        attrs = ", ".join(f"{key}={value}" for key, value in op.attrs)
        dims = "; ".join(", ".join(value.type.dims) for value in op.outputs)
        ours = f"{op.kind}({', '.join(op.inputs)}) <{attrs}> of dims {dims}"
        demand(self.node, holds, f"is {what}, not the IR's {ours}")

    def _results(self, value: object) -> list[Shape]:
        """The shapes of the results, where they follow from those of the operands."""
        match value:
            case Term(head="neg", args=(x,)):
                return self._elementwise("scale", x, by=-1)
            case Term(head="*" | "+" as sign, args=(x, int() | float() as by)):
                return self._elementwise("scale" if sign == "*" else "shift", x, by=by)
            case Term(head="+"):
                return self._elementwise("add", *self._summands(value))
            case Term(head="*" | "/" as sign, args=(x, y)):
                return self._elementwise("mul" if sign == "*" else "div", x, y)
            case Term(
                head="call", args=(Term(head="attr", args=(x, "float" | "double" as wide)), (), {})
            ):
                return self._elementwise(
                    "cast", x, dtype={"float": "f32", "double": "f64"}[str(wide)]
                )
            case Term(head="call", args=(Term(head="attr", args=(of, "unflatten")), args, {})):
                at, sizes = cast(tuple[object, Values], args)
                self._demand(at == -1, f"unflattened at {at}")
                return [self._unflatten(shape, sizes) for shape in self._results(of)]
            case Term(head="call", args=(Term(head="attr", args=(x, "redistribute")), _, options)):
                return self._redistributed(x, cast(Mapping[str, object], options).get("placements"))
            case Term(
                head="call",
                args=(Term(head="name", args=("once" | "on_each_rank" as name,)), args, _),
            ) if not self.target.local:
                first, second, *operands = cast(Values, args)
                of_user = name == "on_each_rank"
                return (
                    self._on_each_rank(first, second, operands)
                    if of_user
                    else self._redistributed(first, second)
                )
            case Term(head="call", args=(function, args, options)):
                name, kind = str(function), self.it.op.kind
                self._demand(name == self.target.function(self.it.op, self.it.program), f"`{name}`")
                readers = {
                    "concat": self._concat,
                    "contract": self._product,
                    "contracts": self._products,
                    "grouped_contract": self._grouped,
                }
                call = readers.get(kind, self._call)
                return call(cast(Values, args), cast(Mapping[str, object], options))
            case _:
                raise wrong(self.node, f"{value} is no op")

    def _demand_op(self, kind: str, operands: Values, **attrs: object) -> None:
        self._demand(kind == self.it.op.kind, f"`{kind}`")
        self._demand((*operands,) == self.operands, f"of {', '.join(map(str, operands))}")
        wanted = dict(self.it.op.attrs)
        for key in {*wanted, *attrs}:
            self._demand(_same(attrs.get(key), wanted.get(key)), f"with {key} {attrs.get(key)}")

    # ---- operators and products

    def _summands(self, value: object) -> list[object]:
        match value:
            case Term(head="+", args=(x, y)) if value not in self.shapes:
                return [*self._summands(x), y]
            case _:
                return [value]

    def _elementwise(self, kind: str, *values: object, **attrs: float | str) -> list[Shape]:
        """Shapes are aligned at their ends, as torch broadcasts them."""
        operands, shapes = zip(*map(self._tensor, values), strict=True)
        whole = self._broadcast(kind, shapes)
        self._demand_op(kind, operands, **attrs)
        return [whole]

    def _broadcast(self, kind: str, shapes: Sequence[Shape]) -> Shape:
        count = max(map(len, shapes))
        padded = [((),) * (count - len(shape)) + shape for shape in shapes]
        whole: Shape = tuple(max(dims, key=len) for dims in zip(*padded, strict=True))
        alike = all(
            dim in ((), full) for shape in padded for dim, full in zip(shape, whole, strict=True)
        )
        self._demand(alike, f"`{kind}` of dims {' and '.join(map(_said, shapes))}")
        return whole

    def _concat(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """All dims but the last are as torch broadcasts them; those last ones together are that
        which the op names.
        """
        operands, shapes = zip(*map(self._tensor, args), strict=True)
        before = self._broadcast("concat", [shape[:-1] for shape in shapes])
        lasts = [(type.dims[-1],) for type in self.it.types]
        self._demand(
            [shape[-1] for shape in shapes] == lasts, f"of {', '.join(map(_said, shapes))}"
        )
        self._demand_op("concat", operands, **options, **dict(self.it.op.attrs))
        return [(*before, (str(self.it.op.get("as")),))]

    def _product(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """`linear` sums over the last dims of both."""
        (x, left), (w, right) = map(self._tensor, args)
        self._demand(
            left[-1] == right[-1], f"a product over {_said(left[-1:])} and {_said(right[-1:])}"
        )
        self._demand_op("contract", (x, w), over=left[-1], **options)
        return [left[:-1] + right[:-1]]

    def _products(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """`fused_linear`; `into` has the sizes of each result that is unflattened."""
        (x, left), *weights = map(self._tensor, args)
        alike = all(right[-1] == left[-1] for _, right in weights)
        self._demand(alike, f"a product over {_said(left[-1:])} and other dims")
        attrs = {key: said for key, said in options.items() if key != "into"}
        attrs |= {key: tuple(map(str, cast(Values, said))) for key, said in attrs.items()}
        self._demand_op("contracts", (x, *(w for w, _ in weights)), over=left[-1], **attrs)
        into = cast(Sequence[Values], options.get("into", ((-1,),) * len(weights)))
        pairs = zip(weights, into, strict=True)
        return [self._unflatten(left[:-1] + right[:-1], sizes) for (_, right), sizes in pairs]

    def _grouped(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """`grouped_linear` sums over the last dims of both, for each expert."""
        (x, left), (w, right) = map(self._tensor, args[:2])
        self._demand(
            left[-1] == right[-1], f"a product over {_said(left[-1:])} and {_said(right[-1:])}"
        )
        self._demand_op("grouped_contract", (x, w, *args[2:]), over=left[-1], **options)
        return [(*left[:-1], sum(right[:-1], ())[1:])]

    def _unflatten(self, shape: Shape, sizes: Values) -> Shape:
        """The last dim as those that are joined in it, which have these sizes on a rank; the
        first may be -1.
        """
        dims = shape[-1]
        type = next((t for t in self.it.types[1:] if {*dims} <= {*t.dims}), self.it.types[0])
        wanted = [self.it.program.local_size(type, dim) for dim in dims]
        fits = (
            len(sizes) == len(dims) and sizes[0] in (-1, wanted[0]) and [*sizes[1:]] == wanted[1:]
        )
        self._demand(fits, f"unflattened to {sizes}, where {', '.join(dims)} are {wanted}")
        return (*shape[:-1], *((dim,) for dim in dims))

    # ---- DTensors

    def _redistributed(self, x: object, to: object) -> list[Shape]:
        """A coercion to placements, one for each axis of the mesh."""
        self._demand_op("coerce", (x,), **dict(self.it.op.attrs))
        shape = self.shapes[x]
        self._demand(to == self._placed(self.it.op.outputs[0].type, shape), f"placed {to}")
        return [shape]

    def _on_each_rank(self, function: object, to: object, operands: Values) -> list[Shape]:
        """A call of a function of the user's own on local tensors."""
        constants = self.target.call(self.it).args
        named = self.machine.spec(self.target.function(self.it.op, self.it.program))
        wanted = (
            self.machine.terms("lambda", named, tuple(cast(Values, constants)))
            if constants
            else named
        )
        self._demand(function is wanted, f"`{function}`")
        self._demand_op("call", operands, **dict(self.it.op.attrs))
        types = [value.type for value in self.it.op.outputs]
        first, *others = (self._placed(type, tuple((dim,) for dim in type.dims)) for type in types)
        self._demand(to == ((first, *others) if others else first), f"placed {to}")
        return []

    def _placed(self, type: Type, shape: Shape) -> object:
        """The placements of a value of a type, one for each axis of the mesh."""
        each = (placed(type.at(axis), shape) for axis in mesh_axes(self.it.program))
        return self.machine.spec(f"[{', '.join(each)}]")

    def _tensor(self, value: object, negative: bool = False) -> tuple[object, Shape]:
        """The operand that a value is a view of, and its shape; of a negative one the sign may
        precede the view.
        """
        own = self.machine.terms("neg", value) if negative else value
        if own in self.shapes:
            return own, self.shapes[own]
        match value:
            case Term(head="neg", args=(positive,)):
                return self._tensor(positive, not negative)
            case Term(
                head="call",
                args=(Term(head="attr", args=(of, "flatten" | "unsqueeze" as view)), args, {}),
            ):
                operand, shape = self._tensor(of, negative)
                at = _indices(args, len(shape) + (view == "unsqueeze"))
                self._demand(bool(at), f"{view} at {args}")
                return operand, (
                    _flattened(shape, *at)
                    if view == "flatten"
                    else (*shape[: at[0]], (), *shape[at[0] :])
                )
            case _:
                raise wrong(self.node, f"{value} is no operand of the IR's {self.it.op.kind}")

    # ---- calls

    def _call(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """The operands, and what the op's entry says."""
        wanted = self.target.call(self.it)
        by_keyword = {each.operand for each in wanted.options.values() if isinstance(each, Keyword)}
        operands = tuple(each for i, each in enumerate(self.operands) if i not in by_keyword)
        fits = len(args) == len(operands) + len(wanted.args) and {*options} == {*wanted.options}
        self._demand(fits, f"with {len(args)} arguments and {', '.join(options) or 'no options'}")
        self._demand((*args[: len(operands)],) == operands, f"of {', '.join(map(str, args))}")
        pairs = [
            (f"{i}", said, each)
            for i, (said, each) in enumerate(zip(args[len(operands) :], wanted.args, strict=True))
        ]
        pairs += [(key, options[key], each) for key, each in wanted.options.items()]
        for key, said, each in pairs:
            self._demand(self._means(said, each), f"with {key} {said}")
        return []

    def _means(self, said: object, wanted: Argument) -> bool:
        """Whether an argument means this."""
        first = self.shapes[self.operands[0]]
        match wanted:
            case Dims(names):
                return [first[i] for i in _indices(said, len(first))] == [
                    self._stored(name) for name in names
                ]
            case Size(dim):
                return _same(said, self.it.program.size(dim))
            case Group(axes):
                return said is self._group(axes)
            case Positions() | PositionIds() | Experts():
                return said is self.machine.spec(layout_of(self.it.program, wanted))
            case Shards(parts):
                given = cast(dict[int, object], said)
                found = {first[i]: i for i in given}
                same = {*found} == {(dim,) for dim in parts} and len(found) == len(given)
                return same and all(
                    self._means(given[found[dim,]], part) for dim, part in parts.items()
                )
            case Keyword(operand):
                return said is self.operands[operand]
            case RotaryTable():
                return said is self.table
            case Quotient(value):
                return _same(said, value)
            case _:
                return _same(said, wanted)

    def _stored(self, dim: str) -> tuple[str, ...]:
        """The dims that lie together with one of the first operand: of rows with room, those of
        tokens.
        """
        program, type = self.it.program, self.it.types[0]
        return program.joined(type)[program.place_of(type, dim)] if dim in type.dims else (dim,)

    def _group(self, axes: Sequence[str]) -> object:
        return self.machine.spec(f"mesh.axis({', '.join(map(repr, axes))})")


def placed(place: Placement, shape: Shape) -> str:
    """A placement on an axis as torch has it, of a tensor of this shape."""
    if place.kind is Kind.SHARDED:
        (at,) = (i for i, dims in enumerate(shape) if dims[:1] == (place.dim,))
        return f"Shard({at})"
    return {Kind.PARTIAL: "Partial()", Kind.MAXIMUM: "Partial('max')"}.get(
        place.kind, "Replicate()"
    )


def layout_of(program: Program, it: Layout) -> str:
    """The expression for the positions or the experts that a rank holds where axes shard them,
    outermost first.
    """
    over = f"mesh, {program.size(it.dim)}{''.join(f', {axis!r}' for axis in it.axes)}"
    if isinstance(it, Experts):
        return f"Experts({over}{f', tokens={it.tokens!r}' if it.tokens else ''})"
    chunked = tuple(axis for axis in it.axes if (it.dim, axis) in program.zigzags)
    function = "position_ids" if isinstance(it, PositionIds) else "Positions"
    return f"{function}({over}{f', zigzag={chunked!r}' if chunked else ''})"


def _flattened(shape: Shape, start: int, end: int = -1) -> Shape:
    first, last = (i % len(shape) for i in (start, end))
    return (*shape[:first], sum(shape[first : last + 1], ()), *shape[last + 1 :])


def _indices(said: object, rank: int) -> tuple[int, ...]:
    """Indices as they are written, or none where one is no index."""
    several = cast(tuple[object, ...], said) if isinstance(said, tuple) else (said,)
    found = tuple(each for each in several if isinstance(each, int) and -rank <= each < rank)
    return found if len(found) == len(several) else ()


def _same(said: object, wanted: object) -> bool:
    """Whether two constants are the same; a number may be written as a whole one."""
    if isinstance(said, int | float) and isinstance(wanted, int | float):
        return float(said) == float(wanted) and isinstance(said, bool) == isinstance(wanted, bool)
    return frozen_key(said) == frozen_key(wanted)


def _said(shape: Shape) -> str:
    return f"[{', '.join('*'.join(dim) or '1' for dim in shape)}]"
