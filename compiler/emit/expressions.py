"""One op as one Python expression.

Purpose: the table from op kinds to the calls of emitted programs.  Non-goals: lines, names, comments.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from attrs import frozen

from ..ir import Attr, Kind, Op, Program, Type
from ..ir.placements import coercion_of, ends
from ..ops import OPS, Attribute
from ..ops.attention import attention_roles, documents_and_draws
from ..ops.chunked_logits import classes_of
from ..ops.protocol import TORCH
from ..ops.user import constants, module_and_function
from .naming import literal

ATOM, PRODUCT, SUM = 3, 2, 1
"""How tightly an expression binds."""


@frozen
class Expr:
    """Python text, how tightly it binds, the values it reads, the ops in it, and what it is the negative of, if any."""

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
    """What an expression needs of its surroundings."""

    program: Program
    types: Callable[[str], Type]
    axis: Callable[[tuple[str, ...]], str]  # the group over these axes
    rotary: Callable[[Op], str]  # the table of rotary positions that an op `rope` turns by
    is_matrix: Callable[[str], bool]  # whether a value is a parameter stored as a matrix
    sizes: Mapping[str, str]  # the names of dims' sizes


def express(op: Op, operands: Sequence[Expr], context: Context) -> Expr:
    """The expression that computes `op` from the expressions of its operands."""
    text, binds = WRITERS.get(op.kind, _call)(op, operands, context)
    reads, ops = tuple(n for e in operands for n in e.reads), (*(o for e in operands for o in e.ops), op)
    return Expr(text, binds, reads, ops, operands[0] if op.kind == "scale" and op.get("by") == -1 else None)


Written = tuple[str, int]


def _call(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """The op's function, with its attributes as keywords."""
    entry = OPS[op.kind]
    assert entry.function, f"emit: {op.kind} has no function"
    function = f"torch.{entry.function}" if entry.module == TORCH else entry.function
    return f"{function}({', '.join([*(e.text for e in operands), *_options(op, context)])})", ATOM


def _options(op: Op, context: Context) -> list[str]:
    """The op's attributes as keywords."""
    known = {attribute.name: attribute for attribute in OPS[op.kind].attributes}
    return [
        f"{known[key].keyword or key}={_value(known[key], value, op, context)}"
        for key, value in op.attrs
        if known[key].keyword is not None
    ]


def _value(attribute: Attribute, value: Attr, op: Op, context: Context) -> str:
    """The value of an attribute; of dims, their places in the first operand."""
    if not attribute.dims:
        return literal(value)
    at = tuple(context.types(op.inputs[0]).dims.index(dim) for dim in op.names(attribute.name))
    return literal(at[0] if len(at) == 1 else at)


def _add(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    text = _aligned(op, 0, SUM, operands[0], context)
    for i, operand in enumerate(operands[1:], start=1):
        sign = "-" if operand.negates else "+"
        text += f" {sign} {_aligned(op, i, PRODUCT, operand.negates or operand, context)}"
    return text, SUM


def _scale(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    if op.get("by") == -1:
        return f"-{operands[0].within(ATOM)}", PRODUCT
    return f"{operands[0].within(PRODUCT)} * {literal(op.get('by'))}", PRODUCT


def _shift(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    by = float(str(op.get("by")))
    return f"{operands[0].within(SUM)} {'-' if by < 0 else '+'} {literal(abs(by))}", SUM


def _div(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    left, right = _aligned(op, 0, PRODUCT, operands[0], context), _aligned(op, 1, ATOM, operands[1], context)
    return f"{left} / {right}", PRODUCT


def _mul(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    left, right = _aligned(op, 0, PRODUCT, operands[0], context), _aligned(op, 1, ATOM, operands[1], context)
    return f"{left} * {right}", PRODUCT


def _aligned(op: Op, index: int, binds: int, operand: Expr, context: Context) -> str:
    """The operand at `index` with the dims that it lacks between its own unsqueezed; torch itself adds those before."""
    own, full = context.types(op.inputs[index]).dims, op.outputs[0].type.dims
    lacking = [i for i, dim in enumerate(full) if dim not in own and set(full[:i]) & set(own)]
    if not lacking:
        return operand.within(binds)
    first = next(i for i, dim in enumerate(full) if dim in own)
    viewed = operand.text if operand.negates else operand.within(ATOM)
    return viewed + "".join(f".unsqueeze({i - first})" for i in lacking)


def _contract(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`linear`, with a left side of several contracted dims flattened and a result of several new dims unflattened."""
    inner = len(op.names("over"))
    weight = context.types(op.inputs[1])
    left = f"{operands[0].within(ATOM)}.flatten(-{inner})" if inner > 1 else operands[0].text
    view = "" if context.is_matrix(op.inputs[1]) else matrix_view(weight, inner)
    right = operands[1].within(ATOM) + view if view else operands[1].text
    _, *others = weight.dims[: len(weight.dims) - inner] or ("",)
    unflatten = f".unflatten(-1, (-1, {', '.join(_sizes(others, weight, context))}))" if others else ""
    return f"{_prefix(context)}linear({left}, {right}){unflatten}", ATOM


def _contracts(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """`fused_linear`; a result is unflattened where its weight has several dims that are not contracted."""
    over = op.names("over")
    left = f"{operands[0].within(ATOM)}.flatten(-{len(over)})" if len(over) > 1 else operands[0].text
    weights = [context.types(name) for name in op.inputs[1:]]
    into = [_sizes([dim for dim in w.dims if dim not in over], w, context) for w in weights]
    each = (f"({', '.join(sizes)}{'' if sizes[1:] else ','})" for sizes in into)
    options = [f"into=({', '.join(each)})"] if any(len(sizes) > 1 for sizes in into) else []
    options += [f"apart={literal(tuple(map(int, op.names('apart'))))}"] if op.names("apart") else []
    return f"fused_linear({', '.join([left, *(weight.text for weight in operands[1:]), *options])})", ATOM


def _sizes(dims: Sequence[str], type: Type, context: Context) -> list[str]:
    """What a rank has of some dims of a value, by the names of those that it has whole."""
    whole = {dim: name for dim, name in context.sizes.items() if dim in dims and not type.axes_of(dim)}
    return [whole.get(dim, str(context.program.local_size(type, dim))) for dim in dims]


def _prefix(context: Context) -> str:
    """What functions begin with whose weight gradients a schedule sets apart."""
    return "split_" if context.program.pipeline and context.program.pipeline.splits else ""


def matrix_view(type: Type, inner: int) -> str:
    """How a value of several outer or inner dims becomes a matrix."""
    outer = len(type.dims) - inner
    return (f".flatten(-{inner})" if inner > 1 else "") + (f".flatten(0, {outer - 1})" if outer > 1 else "")


def _mean(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """By the global size, of which this rank may hold a part."""
    size = prod(context.program.size(dim) for dim in op.names("over"))
    options = ", ".join([*_options(op, context), f"size={size}"])
    return f"{OPS[op.kind].function}({operands[0].text}, {options})", ATOM


def _split(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    sizes = (str(context.program.size(part)) for part in op.names("parts"))
    return f"split({', '.join([operands[0].text, *sizes])})", ATOM


def _user(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    arguments = [*(e.text for e in operands), *map(literal, constants(op))]
    return f"{'.'.join(module_and_function(op))}({', '.join(arguments)})", ATOM


def _rope(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    return f"{OPS[op.kind].function}({', '.join([*(e.text for e in operands), context.rotary(op)])})", ATOM


def _attention(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    given = dict(op.attrs)
    options = ["causal=False"] if given.pop("mask") == "full" else []
    if window := given.pop("window", 0):
        options.append(f"window={round(float(str(window)))}")
    options += [f"{key}={literal(value)}" for key, value in given.items()]
    documents, draws = documents_and_draws(op, operands[3:])
    options += [f"documents={each.text}" for each in documents]
    options += [f"draws={each.text}" for each in draws]
    q, k = (context.types(name) for name in op.inputs[:2])
    own = attention_roles([q, k], op)
    axes, seq = q.axes_of(own.heads), q.dims.index(own.query_seq)
    options += [f"heads={context.axis(axes)}"] if draws and axes else []
    return f"attention({', '.join([*(e.text for e in operands[:3]), f'seq={seq}', *options])})", ATOM


def _dropout(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """The call is told where samples lie, and of which other dims this rank holds a part."""
    type, (samples,) = context.types(op.inputs[0]), context.types(op.inputs[1]).dims
    axes = {i: type.axes_of(dim) for i, dim in enumerate(type.dims) if dim != samples and type.axes_of(dim)}
    split = ", ".join(f"{i}: {context.axis(held)}" for i, held in axes.items())
    where = [f"batch={type.dims.index(samples)}", *([f"split={{{split}}}"] if split else [])]
    return f"dropout({', '.join([*(e.text for e in operands), *_options(op, context), *where])})", ATOM


def _fork(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    return f"fork({operands[0].text}, {context.program.size(str(op.get('repeat')))})", ATOM


def _embedding(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    table = context.types(op.inputs[1])
    axes = table.axes_of(table.dims[0])
    arguments = [*(e.text for e in operands), *([context.axis(axes)] if axes else [])]
    return f"{_prefix(context)}embedding({', '.join(arguments)})", ATOM


def _max_logit(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """Without padding it need not be told which classes this rank holds."""
    padded = _padding(context.types(op.inputs[0]).dims[-1], context)
    return (_of_logits if padded else _call)(op, operands, context)


def _of_logits(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    logits = context.types(op.inputs[0])
    return _over_classes(op, operands, logits.dims[-1], logits.axes_of(logits.dims[-1]), context)


def _of_product(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """A call that makes its own logits, with their bias, if there is one."""
    weight, bias = context.types(op.inputs[1]), [f"bias={each.text}" for each in operands[3:]]
    classes = classes_of(op, weight)
    return _over_classes(op, operands[:3], classes, weight.axes_of(classes), context, bias)


def _rescaled(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    """Told how many classes each rank has."""
    classes, axes = str(op.get("classes")), context.types(op.inputs[0]).axes_in(Kind.MAXIMUM)
    columns = f"columns={context.program.size(classes) // context.program.degree(axes)}"
    return _over_classes(op, operands, classes, axes, context, [columns])


def _padding(dim: str, context: Context) -> list[str]:
    """The option that says how many classes there are, where some are padding."""
    valid = context.program.valid(dim)
    return [f"classes={valid}"] if valid < context.program.size(dim) else []


def _over_classes(
    op: Op, operands: Sequence[Expr], dim: str, axes: tuple[str, ...], context: Context, options: Sequence[str] = ()
) -> Written:
    """A call that is told which part of the classes this rank holds, and how many of all are no padding."""
    group = [context.axis(axes)] if axes else []
    options = [*options, *_padding(dim, context), *_options(op, context)]
    return f"{OPS[op.kind].function}({', '.join([*(e.text for e in operands), *group, *options])})", ATOM


def _coerce(op: Op, operands: Sequence[Expr], context: Context) -> Written:
    source, target = ends(op)
    type = context.types(op.inputs[0])
    arguments = [operands[0].text, context.axis(op.names("axes"))]
    if source.kind is Kind.SHARDED and target.kind is Kind.SHARDED:
        arguments += [f"dim_from={type.dims.index(source.dim)}", f"dim_to={type.dims.index(target.dim)}"]
    elif dim := source.dim or target.dim:
        arguments.append(f"dim={type.dims.index(dim)}")
    elif source.kind is Kind.MAXIMUM:
        arguments.append('op="max"')
    return f"{coercion_of(op).function}({', '.join(arguments)})", ATOM


WRITERS: dict[str, Callable[[Op, Sequence[Expr], Context], Written]] = {
    "add": _add,
    "attention": _attention,
    "call": _user,
    "coerce": _coerce,
    "contract": _contract,
    "contracts": _contracts,
    "cross_entropy": _of_logits,
    "div": _div,
    "dropout": _dropout,
    "embedding": _embedding,
    "fork": _fork,
    "linear_cross_entropy": _of_product,
    "linear_softmax_stats": _of_product,
    "logit_softmax_stats": _of_logits,
    "mean": _mean,
    "mean_square": _mean,
    "max_logit": _max_logit,
    "mul": _mul,
    "rescale_to_global_max": _rescaled,
    "rope": _rope,
    "rope_pair": _rope,
    "scale": _scale,
    "shift": _shift,
    "local_softmax_stats": _of_logits,
    "split": _split,
}
"""The ops that are written otherwise than as a call of their operands and attributes."""
