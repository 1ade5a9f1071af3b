"""One op as one Python expression.

Purpose: the table from op kinds to the calls of emitted programs.  Non-goals: lines, names,
comments.
"""

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, frozen

from ..ir import Kind, Op, Program, Type
from ..ir.placements import ends
from ..ops import OPS
from ..ops.call import (
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
from ..ops.saved_tensors import Local
from .naming import literal, quotient
from .target import RUNTIME_TARGET, Target, placements

ATOM, PRODUCT, SUM = 3, 2, 1
"""How tightly an expression binds."""


@frozen
class Expr:
    """Python text, how tightly it binds, the values it reads, and the ops in it.

    `negates` is the expression whose negative this one is, if there is such.
    """

    text: str
    binds: int
    reads: tuple[str, ...]
    ops: tuple[Op, ...] = ()
    negates: "Expr | None" = None

    def within(self, binds: int) -> str:
        """The text as an operand of an operator that binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"


@frozen
class Context:
    """The surroundings that an expression depends on."""

    program: Program
    types: Callable[[str], Type]
    axis: Callable[[tuple[str, ...]], str]  # the group over these axes
    layout: Callable[[Layout], str]  # the positions or the experts that a rank holds
    rotary: Callable[[Op], str]  # the table of rotary positions of an op `rope`
    is_matrix: Callable[[str], bool]  # whether a value is a parameter stored as a matrix
    sizes: Mapping[str, str]  # the names of dims' sizes
    target: Target = RUNTIME_TARGET

    def index(self, value: str, dim: str) -> int:
        """The number of the tensor's dim that a dim of the IR is, or is part of."""
        return self.program.place_of(self.types(value), dim)


def express(op: Op, operands: Sequence[Expr], context: Context) -> Expr:
    """The expression that computes `op` from the expressions of its operands."""
    target_writers = (
        {} if context.target.local else {"coerce": _redistribution, "call": _on_each_rank}
    )
    writer = target_writers.get(op.kind) or WRITERS.get(op.kind, _call)
    text, binds = writer(op, operands, context)
    reads, ops = list[str](), list[Op]()
    for operand in operands:
        reads += operand.reads
        ops += operand.ops
    is_negative = op.kind == "scale" and op.get("by") == -1
    negates = operands[0] if is_negative else None
    return Expr(text, binds, tuple(reads), (*ops, op), negates)


def as_call(op: Op, operands: Sequence[Expr], context: Context) -> Expr:
    """The same expression as a call of a function, which a block can recompute.

    The call's result may be viewed (`split_view`).
    """
    expr = express(op, operands, context)
    if op.kind == "coerce" and not context.target.local:
        to = placements(op.outputs[0].type, context.program)
        return evolve(expr, text=f"DTensor.redistribute({operands[0].text}, placements={to})")
    if function := FUNCTIONS.get(op.kind):
        texts = (_align(op, i, SUM, operand, context) for i, operand in enumerate(operands))
        return evolve(expr, text=f"{function}({', '.join(texts)})", binds=ATOM)
    return expr


def split_view(text: str) -> tuple[str, str]:
    """The text of a call, and the text of the view of its result, "" if there is none."""
    call, dot, view = text.rpartition(VIEW)
    if dot and call.count("(") == call.count(")"):
        return call, dot + view
    return text, ""


VIEW = ".unflatten("
"""The method by which a product of several outer dims is viewed."""

FUNCTIONS = {"mul": "torch.mul"}
"""Functions that do what an operator of Python does."""

Written = tuple[str, int]
"""The text of an expression, and how tightly it binds."""

CASTS = {"f32": "float", "f64": "double", "bf16": "bfloat16", "f16": "half"}
"""Methods of a tensor, by the element type that they give."""


def _call(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """The call that the op's entry says."""
    entry_call = context.target.call(_local(op, context))
    by_keyword = {
        option.operand for option in entry_call.options.values() if isinstance(option, Keyword)
    }
    arguments = [operand.text for i, operand in enumerate(operands) if i not in by_keyword]
    for argument in entry_call.args:
        arguments.append(_argument(argument, op, operands, context))
    for key, option in entry_call.options.items():
        arguments.append(f"{key}={_argument(option, op, operands, context)}")
    return f"{context.target.function(op, context.program)}({', '.join(arguments)})", ATOM


def _redistribution(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """A coercion as a change of a DTensor's placements."""
    to, (source, target) = placements(op.outputs[0].type, context.program), ends(op)
    if target.kind is Kind.PARTIAL:
        assert source.kind is not Kind.SHARDED, (
            f"emit: {op.outputs[0].name}: no function makes a sum of slices"
        )
        return f"once({operands[0].text}, {to})", ATOM
    return f"{operands[0].within(ATOM)}.redistribute(placements={to})", ATOM


def _on_each_rank(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """A user's own function on a rank's parts: DTensor does not know what it does."""
    function = context.target.function(op, context.program)
    constants = OPS[op.kind].call(_local(op, context)).args
    if constants:
        function = f"lambda *each: {function}(*each, {', '.join(map(literal, constants))})"
    to = [placements(result.type, context.program) for result in op.outputs]
    all_placements = to[0] if len(to) == 1 else f"({', '.join(to)})"
    arguments = [function, all_placements, *(operand.text for operand in operands)]
    return f"on_each_rank({', '.join(arguments)})", ATOM


def _local(op: Op, context: Context) -> Local:
    return Local(context.program, op, tuple(map(context.types, op.inputs)))


def _argument(argument: Argument, op: Op, operands: Sequence[Expr], context: Context) -> str:
    match argument:
        case Dims(names):
            indices = tuple(context.index(op.inputs[0], dim) for dim in names)
            return literal(indices[0] if len(names) == 1 else indices)
        case Size():
            return _size(argument, context)
        case Group(axes):
            return context.axis(axes)
        case Positions() | PositionIds() | Experts():
            return context.layout(argument)
        case Shards(parts):
            texts = {dim: _argument(part, op, operands, context) for dim, part in parts.items()}
            entries = (f"{context.index(op.inputs[0], dim)}: {text}" for dim, text in texts.items())
            return f"{{{', '.join(entries)}}}"
        case Keyword(operand):
            return operands[operand].text
        case RotaryTable():
            return context.rotary(op)
        case Quotient(value, divisor):
            return quotient(value, divisor)
        case _:
            return literal(argument)


def _size(size: Size, context: Context) -> str:
    """A size by its dim's name, if the program has that: `VOCAB`, and of a rank's part
    `VOCAB // 4`.
    """
    name, degree = context.sizes.get(size.dim), context.program.degree(size.axes)
    if name is None:
        return str(size.value(context.program))
    return f"{name} // {degree}" if degree > 1 else name


def _add(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    text = _align(op, 0, SUM, operands[0], context)
    for i, operand in enumerate(operands[1:], start=1):
        sign = "-" if operand.negates else "+"
        text += f" {sign} {_align(op, i, PRODUCT, operand.negates or operand, context)}"
    return text, SUM


def _cast(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    return f"{operands[0].within(ATOM)}.{CASTS[str(op.get('dtype'))]}()", ATOM


def _scale(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    if op.get("by") == -1:
        return f"-{operands[0].within(ATOM)}", PRODUCT
    factor = literal(op.get("by"))
    if "/" in factor:
        factor = f"({factor})"
    return f"{operands[0].within(PRODUCT)} * {factor}", PRODUCT


def _shift(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    by = float(str(op.get("by")))
    sign = "-" if by < 0 else "+"
    return f"{operands[0].within(SUM)} {sign} {literal(abs(by))}", SUM


def _div(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    left = _align(op, 0, PRODUCT, operands[0], context)
    right = _align(op, 1, ATOM, operands[1], context)
    return f"{left} / {right}", PRODUCT


def _mul(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    left = _align(op, 0, PRODUCT, operands[0], context)
    right = _align(op, 1, ATOM, operands[1], context)
    return f"{left} * {right}", PRODUCT


def _concat(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    *before, _ = op.outputs[0].type.dims
    texts = list[str]()
    for i, name in enumerate(op.inputs):
        last = context.types(name).dims[-1]
        texts.append(_align(op, i, SUM, operands[i], context, (*before, last)))
    return f"{context.target.function(op, context.program)}({', '.join(texts)})", ATOM


def _align(
    op: Op,
    index: int,
    binds: int,
    operand: Expr,
    context: Context,
    full: tuple[str, ...] | None = None,
) -> str:
    """The operand at `index`, with each dim unsqueezed that it lacks between its own dims.

    Torch itself adds the dims that it lacks before its first one.  The operand comes to have the
    dims `full`, by default the result's.
    """
    full = full or op.outputs[0].type.dims
    present = context.types(op.inputs[index]).dims
    first, lacking = len(full), list[int]()
    for i, dim in enumerate(full):
        if dim in present:
            first = min(first, i)
        elif i > first:
            lacking.append(i)
    if not lacking:
        return operand.within(binds)
    viewed = operand.text if operand.negates else operand.within(ATOM)
    return viewed + "".join(f".unsqueeze({i - first})" for i in lacking)


def _contract(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`linear`, with a left side of several contracted dims flattened and a result of several
    new dims unflattened.
    """
    inner = len(op.names("over"))
    weight = context.types(op.inputs[1])
    left = _flatten(operands[0], inner)
    right = operands[1].text
    if not context.is_matrix(op.inputs[1]) and (view := matrix_view(weight, inner)):
        right = operands[1].within(ATOM) + view
    _, *others = weight.dims[: len(weight.dims) - inner] or ("",)
    function = context.target.function(op, context.program)
    return f"{function}({left}, {right}){_unflatten(others, weight, context)}", ATOM


def _flatten(operand: Expr, inner: int) -> str:
    """The left side of a product whose `inner` last dims are summed over, as one dim."""
    return f"{operand.within(ATOM)}.flatten(-{inner})" if inner > 1 else operand.text


def _unflatten(others: Sequence[str], weight: Type, context: Context) -> str:
    """The view of a product's result where the weight has several outer dims: the first one and
    `others`.
    """
    if not others:
        return ""
    return f".unflatten(-1, {_view_sizes(others, weight, context)})"


def _view_sizes(others: Sequence[str], weight: Type, context: Context) -> str:
    """The sizes of a product's last dims: torch finds the first one, which axes may shard."""
    return f"(-1, {', '.join(_sizes(others, weight, context))})"


def _contracts(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`fused_linear`; a result is unflattened where its weight has several dims that are not
    contracted.
    """
    over = op.names("over")
    arguments = [_flatten(operands[0], len(over)), *(weight.text for weight in operands[1:])]
    views = list[str]()
    for name in op.inputs[1:]:
        weight = context.types(name)
        _, *others = (dim for dim in weight.dims if dim not in over)
        views.append(_view_sizes(others, weight, context) if others else "(-1,)")
    if {*views} != {"(-1,)"}:
        arguments.append(f"into=({', '.join(views)})")
    if apart := op.names("apart"):
        arguments.append(f"apart={literal(tuple(map(int, apart)))}")
    return f"fused_linear({', '.join(arguments)})", ATOM


def _grouped_product(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`grouped_linear`, as `_contract` writes a product."""
    over, weight = op.names("over"), context.types(op.inputs[1])
    _, _, *others = (dim for dim in weight.dims if dim not in over)
    texts = [_flatten(operands[0], len(over)), *(operand.text for operand in operands[1:])]
    function = context.target.function(op, context.program)
    return f"{function}({', '.join(texts)}){_unflatten(others, weight, context)}", ATOM


def _sizes(dims: Sequence[str], type: Type, context: Context) -> list[str]:
    """The sizes of some dims of a value on a rank, by name where the rank has the whole dim."""
    sizes = list[str]()
    for dim in dims:
        name = context.sizes.get(dim)
        if name is None or type.axes_of(dim):
            name = str(context.program.local_size(type, dim))
        sizes.append(name)
    return sizes


def matrix_view(type: Type, inner: int) -> str:
    """How a value of several outer or inner dims becomes a matrix."""
    outer, view = len(type.dims) - inner, ""
    if inner > 1:
        view += f".flatten(-{inner})"
    if outer > 1:
        view += f".flatten(0, {outer - 1})"
    return view


WRITERS: dict[str, Callable[[Op, Sequence[Expr], Context], Written]] = {
    "add": _add,
    "cast": _cast,
    "concat": _concat,
    "contract": _contract,
    "contracts": _contracts,
    "div": _div,
    "grouped_contract": _grouped_product,
    "mul": _mul,
    "scale": _scale,
    "shift": _shift,
}
"""The ops that Python has operators for, and those whose operands or results are viewed."""
