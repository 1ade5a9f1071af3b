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
    """Compares expressions with ops; `types` are the types of all values, `shape` gives the dims
    of a value as stored.
    """

    machine: Machine
    program: Program
    types: Mapping[str, Type]
    shape: Callable[[str], Shape]
    target: Target

    def demand(self, op: Op, value: object, operands: Values) -> None:
        """Raises where `value`, computed from the terms of the operands, is not what the op is."""
        shapes = dict(zip(operands, map(self.shape, op.inputs), strict=True))
        local = Local(self.program, op, tuple(self.types[name] for name in op.inputs))
        node = self.machine.at.get(cast(Term, value), ast.Module([], []))
        table = self.rotary_table(op)
        reader = Reader(self.machine, local, tuple(operands), shapes, table, node, self.target)
        reader.compare(value)

    def rotary_table(self, op: Op) -> object:
        """The table of rotary positions that an op rotates with, if it does: of the sequence and
        the last dim.
        """
        attrs, positions = dict(op.attrs), roles(op, self.types).query_seq
        if "theta" not in attrs:
            return None
        type = self.types[op.inputs[0]]
        width, axes = self.program.local_size(type, type.dims[-1]), type.axes_of(positions)
        theta, dims = attrs.pop("theta"), round(float(str(attrs.pop("dims", width))))
        options = {"theta": theta, **attrs}
        seq_dim = -1 - type.dims[::-1].index(positions)
        if seq_dim != -3:  # the function's default
            options["seq_dim"] = seq_dim
        arguments = [str(self.program.size(positions)), str(dims)]
        arguments += [f"{key}={value!r}" for key, value in options.items()]
        arguments.append(f"dtype={DTYPES[PRECISIONS[self.program.train.precision]]}")
        placed_arguments = self._table_arguments(", ".join(arguments), positions, axes)
        return self.machine.spec(f"rope_frequencies({placed_arguments})")

    def _table_arguments(self, arguments: str, seq: str, axes: tuple[str, ...]) -> str:
        """The arguments of a table, and the arguments that say which positions a rank has."""
        if self.target.local:
            positions = ""
            if axes:
                positions = f", positions={layout_of(self.program, Positions(seq, axes))}"
            return f"{arguments}{positions}, mesh=mesh"
        placements = list[str]()
        for axis in mesh_axes(self.program):
            placement = sharded(seq) if axis in axes else INVARIANT
            placements.append(placement_text(placement, ((), (seq,))))
        ranks = zigzag_ranks(self.program)
        zigzag = f", zigzag={ranks}" if ranks > 1 else ""
        return f"mesh, {arguments}, placements=[{', '.join(placements)}]{zigzag}"


@define
class Reader:
    """Reads one expression: `shapes` are the shapes of the operands, by their terms."""

    machine: Machine
    local: Local
    operands: tuple[object, ...]
    shapes: Mapping[object, Shape]
    table: object
    node: ast.AST
    target: Target

    def compare(self, value: object) -> None:
        """Raises where an expression is another op, or its results have other dims."""
        shapes_of_text = self._results(value)
        wanted = [
            self.local.program.dims_in_memory(result.type) for result in self.local.op.outputs
        ]
        self._demand(
            shapes_of_text in ([], wanted), f"of dims {', '.join(map(_shape_text, shapes_of_text))}"
        )

    def _demand(self, holds: bool, what: str) -> None:
        op = self.local.op
        attrs = ", ".join(f"{key}={value}" for key, value in op.attrs)
        dims = "; ".join(", ".join(value.type.dims) for value in op.outputs)
        ours = f"{op.kind}({', '.join(op.inputs)}) <{attrs}> of dims {dims}"
        demand(self.node, holds, f"is {what}, not the IR's {ours}")

    def _results(self, value: object) -> list[Shape]:
        """The shapes of the results, where they follow from the operands' shapes."""
        match value:
            case Term(head="call", args=(function, args, options)):
                return self._results_of_call(
                    function, cast(Values, args), cast(Mapping[str, object], options)
                )
            case Term(head="neg", args=(x,)):
                return self._elementwise("scale", x, by=-1)
            case Term(head="*" | "+" as sign, args=(x, int() | float() as by)):
                return self._elementwise("scale" if sign == "*" else "shift", x, by=by)
            case Term(head="+"):
                return self._elementwise("add", *self._summands(value))
            case Term(head="*" | "/" as sign, args=(x, y)):
                return self._elementwise("mul" if sign == "*" else "div", x, y)
            case _:
                raise wrong(self.node, f"{value} is no op")

    def _results_of_call(
        self, function: object, args: Values, options: Mapping[str, object]
    ) -> list[Shape]:
        """The shapes of the results of a call."""
        match function:
            case Term(head="attr", args=(x, "float" | "double" as wide)) if not args:
                dtype = {"float": "f32", "double": "f64"}[str(wide)]
                return self._elementwise("cast", x, dtype=dtype)
            case Term(head="attr", args=(viewed, "unflatten")):
                dim, sizes = cast(tuple[object, Values], args)
                self._demand(dim == -1, f"unflattened at {dim}")
                return [self._unflatten(shape, sizes) for shape in self._results(viewed)]
            case Term(head="attr", args=(x, "redistribute")):
                return self._redistribute(x, options.get("placements"))
            case Term(head="name", args=("once",)) if not self.target.local:
                x, to, *_ = args
                return self._redistribute(x, to)
            case Term(head="name", args=("on_each_rank",)) if not self.target.local:
                user_function, to, *operands = args
                return self._on_each_rank(user_function, to, operands)
            case _:
                wanted = self.target.function(self.local.op, self.local.program)
                self._demand(str(function) == wanted, f"`{function}`")
                readers = {
                    "concat": self._concat,
                    "contract": self._product,
                    "contracts": self._products,
                    "grouped_contract": self._grouped_product,
                }
                return readers.get(self.local.op.kind, self._call)(args, options)

    def _demand_op(self, kind: str, operands: Values, **attrs: object) -> None:
        self._demand(kind == self.local.op.kind, f"`{kind}`")
        self._demand((*operands,) == self.operands, f"of {', '.join(map(str, operands))}")
        wanted = dict(self.local.op.attrs)
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
        alike = True
        for shape in padded:
            for dim, full in zip(shape, whole, strict=True):
                alike = alike and dim in ((), full)
        self._demand(alike, f"`{kind}` of dims {' and '.join(map(_shape_text, shapes))}")
        return whole

    def _concat(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """All dims but the last are as torch broadcasts them; the last ones together are the dim
        that the op names.
        """
        operands, shapes = zip(*map(self._tensor, args), strict=True)
        before = self._broadcast("concat", [shape[:-1] for shape in shapes])
        lasts = [(type.dims[-1],) for type in self.local.types]
        self._demand(
            [shape[-1] for shape in shapes] == lasts, f"of {', '.join(map(_shape_text, shapes))}"
        )
        self._demand_op("concat", operands, **options, **dict(self.local.op.attrs))
        return [(*before, (str(self.local.op.get("as")),))]

    def _product(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """`linear` sums over the last dims of both."""
        (x, left), (w, right) = map(self._tensor, args)
        self._demand(
            left[-1] == right[-1],
            f"a product over {_shape_text(left[-1:])} and {_shape_text(right[-1:])}",
        )
        self._demand_op("contract", (x, w), over=left[-1], **options)
        return [left[:-1] + right[:-1]]

    def _products(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """`fused_linear`; `into` has the sizes of each result that is unflattened."""
        (x, left), *weights = map(self._tensor, args)
        alike = all(right[-1] == left[-1] for _, right in weights)
        self._demand(alike, f"a product over {_shape_text(left[-1:])} and other dims")
        attrs = dict[str, tuple[str, ...]]()
        for key, option in options.items():
            if key != "into":
                attrs[key] = tuple(map(str, cast(Values, option)))
        self._demand_op("contracts", (x, *(w for w, _ in weights)), over=left[-1], **attrs)
        into = cast(Sequence[Values], options.get("into", ((-1,),) * len(weights)))
        shapes = list[Shape]()
        for (_, right), sizes in zip(weights, into, strict=True):
            shapes.append(self._unflatten(left[:-1] + right[:-1], sizes))
        return shapes

    def _grouped_product(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """`grouped_linear` sums over the last dims of both, for each expert."""
        (x, left), (w, right) = map(self._tensor, args[:2])
        self._demand(
            left[-1] == right[-1],
            f"a product over {_shape_text(left[-1:])} and {_shape_text(right[-1:])}",
        )
        self._demand_op("grouped_contract", (x, w, *args[2:]), over=left[-1], **options)
        return [(*left[:-1], sum(right[:-1], ())[1:])]

    def _unflatten(self, shape: Shape, sizes: Values) -> Shape:
        """The last dim as the dims that are joined in it, which have these sizes on a rank.

        The first size may be -1.
        """
        dims = shape[-1]
        type = next((t for t in self.local.types[1:] if {*dims} <= {*t.dims}), self.local.types[0])
        wanted = [self.local.program.local_size(type, dim) for dim in dims]
        fits = (
            len(sizes) == len(dims) and sizes[0] in (-1, wanted[0]) and [*sizes[1:]] == wanted[1:]
        )
        self._demand(fits, f"unflattened to {sizes}, where {', '.join(dims)} are {wanted}")
        return (*shape[:-1], *((dim,) for dim in dims))

    # ---- DTensors

    def _redistribute(self, x: object, to: object) -> list[Shape]:
        """A coercion to placements, one for each axis of the mesh."""
        self._demand_op("coerce", (x,), **dict(self.local.op.attrs))
        shape = self.shapes[x]
        self._demand(to == self._placements(self.local.op.outputs[0].type, shape), f"placed {to}")
        return [shape]

    def _on_each_rank(self, function: object, to: object, operands: Values) -> list[Shape]:
        """A call of a function of the user's own on local tensors."""
        constants = self.target.call(self.local).args
        named = self.machine.spec(self.target.function(self.local.op, self.local.program))
        wanted = named
        if constants:
            wanted = self.machine.terms("lambda", named, tuple(cast(Values, constants)))
        self._demand(function is wanted, f"`{function}`")
        self._demand_op("call", operands, **dict(self.local.op.attrs))
        placements = list[object]()
        for result in self.local.op.outputs:
            shape = tuple((dim,) for dim in result.type.dims)
            placements.append(self._placements(result.type, shape))
        wanted_placements = placements[0] if len(placements) == 1 else tuple(placements)
        self._demand(to == wanted_placements, f"placed {to}")
        return []

    def _placements(self, type: Type, shape: Shape) -> object:
        """The placements of a value of a type, one for each axis of the mesh."""
        placements = (
            placement_text(type.placement_on(axis), shape) for axis in mesh_axes(self.local.program)
        )
        return self.machine.spec(f"[{', '.join(placements)}]")

    def _tensor(self, value: object, negative: bool = False) -> tuple[object, Shape]:
        """The operand that a value is a view of, and its shape.

        The sign of a negative operand may precede the view.
        """
        operand = self.machine.terms("neg", value) if negative else value
        if operand in self.shapes:
            return operand, self.shapes[operand]
        match value:
            case Term(head="neg", args=(positive,)):
                return self._tensor(positive, not negative)
            case Term(
                head="call",
                args=(Term(head="attr", args=(viewed, "flatten" | "unsqueeze" as view)), args, {}),
            ):
                operand, shape = self._tensor(viewed, negative)
                indices = _indices(args, len(shape) + (view == "unsqueeze"))
                self._demand(bool(indices), f"{view} at {args}")
                if view == "flatten":
                    return operand, _flatten(shape, *indices)
                first = indices[0]
                return operand, (*shape[:first], (), *shape[first:])
            case _:
                raise wrong(self.node, f"{value} is no operand of the IR's {self.local.op.kind}")

    # ---- calls

    def _call(self, args: Values, options: Mapping[str, object]) -> list[Shape]:
        """The operands, and what the op's entry says."""
        wanted = self.target.call(self.local)
        by_keyword = {
            option.operand for option in wanted.options.values() if isinstance(option, Keyword)
        }
        operands = tuple(operand for i, operand in enumerate(self.operands) if i not in by_keyword)
        count = len(operands)
        fits = len(args) == count + len(wanted.args) and {*options} == {*wanted.options}
        self._demand(fits, f"with {len(args)} arguments and {', '.join(options) or 'no options'}")
        self._demand((*args[:count],) == operands, f"of {', '.join(map(str, args))}")
        for i, (value, argument) in enumerate(zip(args[count:], wanted.args, strict=True)):
            self._demand(self._means(value, argument), f"with {i} {value}")
        for key, option in wanted.options.items():
            self._demand(self._means(options[key], option), f"with {key} {options[key]}")
        return []

    def _means(self, value: object, wanted: Argument) -> bool:
        """Whether the value of an argument is the wanted one."""
        first = self.shapes[self.operands[0]]
        match wanted:
            case Dims(names):
                dims = [first[i] for i in _indices(value, len(first))]
                return dims == [self._dims_in_memory(name) for name in names]
            case Size():
                return _same(value, wanted.value(self.local.program))
            case Group(axes):
                return value is self._group(axes)
            case Positions() | PositionIds() | Experts():
                return value is self.machine.spec(layout_of(self.local.program, wanted))
            case Shards(parts):
                return self._means_shards(cast(dict[int, object], value), parts)
            case Keyword(operand):
                return value is self.operands[operand]
            case RotaryTable():
                return value is self.table
            case Quotient(number):
                return _same(value, number)
            case _:
                return _same(value, wanted)

    def _means_shards(self, by_index: dict[int, object], parts: Mapping[str, Argument]) -> bool:
        """Whether the arguments of dims, by index, are the wanted ones, by name."""
        first = self.shapes[self.operands[0]]
        index_of = {first[i]: i for i in by_index}
        if {*index_of} != {(dim,) for dim in parts} or len(index_of) != len(by_index):
            return False
        return all(self._means(by_index[index_of[dim,]], part) for dim, part in parts.items())

    def _dims_in_memory(self, dim: str) -> tuple[str, ...]:
        """The dims that lie together with a dim of the first operand; the rows of a padded buffer
        lie with the tokens.
        """
        program, type = self.local.program, self.local.types[0]
        if dim not in type.dims:
            return (dim,)
        return program.dims_in_memory(type)[program.place_of(type, dim)]

    def _group(self, axes: Sequence[str]) -> object:
        return self.machine.spec(f"mesh.axis({', '.join(map(repr, axes))})")


def placement_text(place: Placement, shape: Shape) -> str:
    """A placement on an axis as torch has it, of a tensor of this shape."""
    if place.kind is Kind.SHARDED:
        (index,) = (i for i, dims in enumerate(shape) if dims[:1] == (place.dim,))
        return f"Shard({index})"
    words = {Kind.PARTIAL: "Partial()", Kind.MAXIMUM: "Partial('max')"}
    return words.get(place.kind, "Replicate()")


def layout_of(program: Program, layout: Layout) -> str:
    """The expression for the positions or the experts that a rank holds where axes shard them,
    outermost first.
    """
    arguments = ["mesh", str(program.size(layout.dim)), *map(repr, layout.axes)]
    if isinstance(layout, Experts):
        if layout.tokens:
            arguments.append(f"tokens={layout.tokens!r}")
        return f"Experts({', '.join(arguments)})"
    chunked = tuple(axis for axis in layout.axes if (layout.dim, axis) in program.zigzags)
    if chunked:
        arguments.append(f"zigzag={chunked!r}")
    function = "position_ids" if isinstance(layout, PositionIds) else "Positions"
    return f"{function}({', '.join(arguments)})"


def _flatten(shape: Shape, start: int, end: int = -1) -> Shape:
    first, last = (i % len(shape) for i in (start, end))
    return (*shape[:first], sum(shape[first : last + 1], ()), *shape[last + 1 :])


def _indices(value: object, rank: int) -> tuple[int, ...]:
    """Indices as they are written, or none where one is no index."""
    values = cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,)
    indices = list[int]()
    for index in values:
        if not (isinstance(index, int) and -rank <= index < rank):
            return ()
        indices.append(index)
    return tuple(indices)


def _same(value: object, wanted: object) -> bool:
    """Whether two constants are the same; a number may be written as a whole one."""
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return float(value) == float(wanted) and isinstance(value, bool) == isinstance(wanted, bool)
    return frozen_key(value) == frozen_key(wanted)


def _shape_text(shape: Shape) -> str:
    return f"[{', '.join('*'.join(dim) or '1' for dim in shape)}]"
