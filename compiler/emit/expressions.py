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
    """Python text, how tightly it binds, the values it reads, the ops in it, and what it is the
    negative of, if any.
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
        """Which of a tensor's dims it is, or is in."""
        return self.program.place_of(self.types(value), dim)


def express(op: Op, operands: Sequence[Expr], context: Context) -> Expr:
    """The expression that computes `op` from the expressions of its operands."""
    own = {} if context.target.local else {"coerce": _coerced, "call": _on_each_rank}
    writer = own.get(op.kind) or WRITERS.get(op.kind, _call)
    text, binds = writer(op, operands, context)
    reads, ops = (
        tuple(n for e in operands for n in e.reads),
        (*(o for e in operands for o in e.ops), op),
    )
    return Expr(
        text, binds, reads, ops, operands[0] if op.kind == "scale" and op.get("by") == -1 else None
    )


def as_call(op: Op, operands: Sequence[Expr], context: Context) -> Expr:
    """The same as a call of a function, whose result may be viewed (`split_view`): a block
    recomputes that.
    """
    found = express(op, operands, context)
    if op.kind == "coerce" and not context.target.local:
        to = placements(op.outputs[0].type, context.program)
        return evolve(found, text=f"DTensor.redistribute({operands[0].text}, placements={to})")
    if function := FUNCTIONS.get(op.kind):
        texts = (_aligned(op, i, SUM, operand, context) for i, operand in enumerate(operands))
        return evolve(found, text=f"{function}({', '.join(texts)})", binds=ATOM)
    return found


def split_view(text: str) -> tuple[str, str]:
    """The text of a call, and that of the view of its result, if there is one."""
    call, dot, view = text.rpartition(VIEW)
    return (call, dot + view) if dot and call.count("(") == call.count(")") else (text, "")


VIEW = ".unflatten("
"""The method by which a product of several outer dims is viewed."""

FUNCTIONS = {"mul": "torch.mul"}
"""Functions that do what an operator of Python does."""

Written = tuple[str, int]
CASTS = {"f32": "float", "f64": "double", "bf16": "bfloat16", "f16": "half"}
"""Methods of a tensor, by the element type that they give."""


def _call(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """The call that the op's entry says."""
    said = context.target.call(_local(op, context))
    by_keyword = {each.operand for each in said.options.values() if isinstance(each, Keyword)}
    arguments = [operand.text for i, operand in enumerate(operands) if i not in by_keyword]
    arguments += [_argument(each, op, operands, context) for each in said.args]
    arguments += [
        f"{key}={_argument(each, op, operands, context)}" for key, each in said.options.items()
    ]
    return f"{context.target.function(op, context.program)}({', '.join(arguments)})", ATOM


def _coerced(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """A coercion as a change of a DTensor's placements."""
    to, (source, target) = placements(op.outputs[0].type, context.program), ends(op)
    if target.kind is Kind.PARTIAL:
        assert source.kind is not Kind.SHARDED, (
            f"emit: {op.outputs[0].name}: no function makes a sum of slices"
        )
        return f"once({operands[0].text}, {to})", ATOM
    return f"{operands[0].within(ATOM)}.redistribute(placements={to})", ATOM


def _on_each_rank(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """A function of the user's own, of a rank's parts: DTensor does not know what it does."""
    function, constants = (
        context.target.function(op, context.program),
        OPS[op.kind].call(_local(op, context)).args,
    )
    if constants:
        function = f"lambda *each: {function}(*each, {', '.join(map(literal, constants))})"
    first, *others = (placements(each.type, context.program) for each in op.outputs)
    to = f"({', '.join([first, *others])})" if others else first
    return (
        f"on_each_rank({', '.join([function, to, *(operand.text for operand in operands)])})",
        ATOM,
    )


def _local(op: Op, context: Context) -> Local:
    return Local(context.program, op, tuple(map(context.types, op.inputs)))


def _argument(argument: Argument, op: Op, operands: Sequence[Expr], context: Context) -> str:
    match argument:
        case Dims(names):
            at = tuple(context.index(op.inputs[0], dim) for dim in names)
            return literal(at[0] if len(names) == 1 else at)
        case Size(dim):
            return context.sizes.get(dim, str(context.program.size(dim)))
        case Group(axes):
            return context.axis(axes)
        case Positions() | PositionIds() | Experts():
            return context.layout(argument)
        case Shards(parts):
            texts = {dim: _argument(part, op, operands, context) for dim, part in parts.items()}
            each = (f"{context.index(op.inputs[0], dim)}: {text}" for dim, text in texts.items())
            return f"{{{', '.join(each)}}}"
        case Keyword(operand):
            return operands[operand].text
        case RotaryTable():
            return context.rotary(op)
        case Quotient(value, divisor):
            return quotient(value, divisor)
        case _:
            return literal(argument)


def _add(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    text = _aligned(op, 0, SUM, operands[0], context)
    for i, operand in enumerate(operands[1:], start=1):
        sign = "-" if operand.negates else "+"
        text += f" {sign} {_aligned(op, i, PRODUCT, operand.negates or operand, context)}"
    return text, SUM


def _cast(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    return f"{operands[0].within(ATOM)}.{CASTS[str(op.get('dtype'))]}()", ATOM


def _scale(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    if op.get("by") == -1:
        return f"-{operands[0].within(ATOM)}", PRODUCT
    by = literal(op.get("by"))
    return f"{operands[0].within(PRODUCT)} * {f'({by})' if '/' in by else by}", PRODUCT


def _shift(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    by = float(str(op.get("by")))
    return f"{operands[0].within(SUM)} {'-' if by < 0 else '+'} {literal(abs(by))}", SUM


def _div(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    left, right = (
        _aligned(op, 0, PRODUCT, operands[0], context),
        _aligned(op, 1, ATOM, operands[1], context),
    )
    return f"{left} / {right}", PRODUCT


def _mul(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    left, right = (
        _aligned(op, 0, PRODUCT, operands[0], context),
        _aligned(op, 1, ATOM, operands[1], context),
    )
    return f"{left} * {right}", PRODUCT


def _concat(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    *before, _ = op.outputs[0].type.dims
    lasts = (context.types(name).dims[-1] for name in op.inputs)
    each = (
        _aligned(op, i, SUM, operands[i], context, (*before, last)) for i, last in enumerate(lasts)
    )
    return f"{context.target.function(op, context.program)}({', '.join(each)})", ATOM


def _aligned(
    op: Op,
    index: int,
    binds: int,
    operand: Expr,
    context: Context,
    full: tuple[str, ...] | None = None,
) -> str:
    """The operand at `index`, with dims that it lacks between its own unsqueezed; torch itself adds
    those before.

    It comes to have the dims `full`, by default the result's.
    """
    own, full = context.types(op.inputs[index]).dims, full or op.outputs[0].type.dims
    lacking = [i for i, dim in enumerate(full) if dim not in own and set(full[:i]) & set(own)]
    if not lacking:
        return operand.within(binds)
    first = next(i for i, dim in enumerate(full) if dim in own)
    viewed = operand.text if operand.negates else operand.within(ATOM)
    return viewed + "".join(f".unsqueeze({i - first})" for i in lacking)


def _contract(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`linear`, with a left side of several contracted dims flattened and a result of several
    new dims unflattened.
    """
    inner = len(op.names("over"))
    weight = context.types(op.inputs[1])
    left = f"{operands[0].within(ATOM)}.flatten(-{inner})" if inner > 1 else operands[0].text
    view = "" if context.is_matrix(op.inputs[1]) else matrix_view(weight, inner)
    right = operands[1].within(ATOM) + view if view else operands[1].text
    _, *others = weight.dims[: len(weight.dims) - inner] or ("",)
    unflatten = (
        f".unflatten(-1, (-1, {', '.join(_sizes(others, weight, context))}))" if others else ""
    )
    return f"{context.target.function(op, context.program)}({left}, {right}){unflatten}", ATOM


def _contracts(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`fused_linear`; a result is unflattened where its weight has several dims that are not
    contracted.
    """
    over = op.names("over")
    left = (
        f"{operands[0].within(ATOM)}.flatten(-{len(over)})" if len(over) > 1 else operands[0].text
    )
    weights = [context.types(name) for name in op.inputs[1:]]
    into = [_sizes([dim for dim in w.dims if dim not in over], w, context) for w in weights]
    each = (f"({', '.join(sizes)}{'' if sizes[1:] else ','})" for sizes in into)
    options = [f"into=({', '.join(each)})"] if any(len(sizes) > 1 for sizes in into) else []
    options += [f"apart={literal(tuple(map(int, op.names('apart'))))}"] if op.names("apart") else []
    return (
        f"fused_linear({', '.join([left, *(weight.text for weight in operands[1:]), *options])})",
        ATOM,
    )


def _grouped(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`grouped_linear`, as `_contract` writes a product."""
    over, weight = op.names("over"), context.types(op.inputs[1])
    left = (
        f"{operands[0].within(ATOM)}.flatten(-{len(over)})" if len(over) > 1 else operands[0].text
    )
    _, _, *others = (dim for dim in weight.dims if dim not in over)
    unflatten = (
        f".unflatten(-1, (-1, {', '.join(_sizes(others, weight, context))}))" if others else ""
    )
    arguments = ", ".join([left, *(operand.text for operand in operands[1:])])
    return f"{context.target.function(op, context.program)}({arguments}){unflatten}", ATOM


def _sizes(dims: Sequence[str], type: Type, context: Context) -> list[str]:
    """The sizes of some dims of a value on a rank, by name where the rank has the whole dim."""
    whole = {
        dim: name for dim, name in context.sizes.items() if dim in dims and not type.axes_of(dim)
    }
    return [whole.get(dim, str(context.program.local_size(type, dim))) for dim in dims]


def matrix_view(type: Type, inner: int) -> str:
    """How a value of several outer or inner dims becomes a matrix."""
    outer = len(type.dims) - inner
    return (f".flatten(-{inner})" if inner > 1 else "") + (
        f".flatten(0, {outer - 1})" if outer > 1 else ""
    )


WRITERS: dict[str, Callable[[Op, Sequence[Expr], Context], Written]] = {
    "add": _add,
    "cast": _cast,
    "concat": _concat,
    "contract": _contract,
    "contracts": _contracts,
    "div": _div,
    "grouped_contract": _grouped,
    "mul": _mul,
    "scale": _scale,
    "shift": _shift,
}
"""The ops that Python has operators for, and those whose operands or results are viewed."""
