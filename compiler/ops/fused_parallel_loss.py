"""Cross entropy over a sharded vocabulary, in one pass over the logits: the statistics of each
rank's own classes.

These are the largest logit m, the sum of exponents z relative to it, and the label's logit t, if
the label is among the rank's classes.  `rescale_to_global_max` brings them to what
`local_softmax_stats` gives, once the ranks know the largest logit of all.  Logits are in memory, or
computed from a product in chunks of classes, and recomputed for their gradient
(`runtime.kernels.linear_cross_entropy` says what that costs).  Non-goals: where these ops are used
(`passes.fuse_ops`).
"""

from collections.abc import Sequence
from functools import partial

from ..ir import BATCH, MAXIMUM, PARTIAL, REPLICATED, Kind, Op, Placement, Program, Type, sharded
from .algebra import ADD, CONTRACT
from .call import Call, Size, over_classes
from .chunked_logits import INNER, PRODUCT, check, chunk, logits_work, product_call, product_roles
from .loss import CAP, SMOOTHING, call_for_own_classes, in_pass, wide
from .protocol import KERNELS, Attribute, OpDef, TypingError, Vjp, is_pending, takes
from .roles import last_is_classes
from .saved_tensors import Local, Saved
from .work import Work

SHARES = Attribute("as", kinds=(str,))


def _parts(program: Program, logits: Type, labels: Type, op: Op) -> list[Type]:
    """m, z and t of logits."""
    (*tokens, classes), shares = logits.dims, str(op.get("as"))
    if is_pending(logits):
        raise TypingError(f"{op.kind} is not linear in what is partial")
    if any(labels.axes_of(dim) != logits.axes_of(dim) for dim in tokens):
        raise TypingError(f"{op.kind} takes the labels of the tokens that a rank has")
    axes = logits.axes_of(classes)
    if program.size(shares) != program.degree(axes):
        raise TypingError(f"{op.kind} gives one share for each rank over which {classes} lies")

    def type_of(dims: Sequence[str], of_classes: Placement) -> Type:
        return Type(wide(logits.dtype), tuple(dims), _places_on(program, logits, axes, of_classes))

    return [
        type_of(tokens, MAXIMUM),
        type_of([*tokens, shares], sharded(shares)),
        type_of(tokens, PARTIAL),
    ]


def _places_on(
    program: Program, type: Type, axes: Sequence[str], to: Placement
) -> tuple[tuple[str, Placement], ...]:
    """The placements of a type, but on these axes."""
    return program.places(dict(type.places) | dict.fromkeys(axes, to))


def _saves(local: Local) -> Saved:
    """All operands, and m."""
    return Saved(operands=tuple(range(len(local.types))), results=(0,))


# ---- of logits that are there


def _logit_softmax_stats(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    logits, labels = types
    if not logits.dims or logits.dims[:-1] != labels.dims:
        raise TypingError(f"{op.kind} takes logits of dims [{', '.join(labels.dims)}, classes]")
    return _parts(program, logits, labels, op)


# ---- of a product


def _by(entry: OpDef, program: Program, types: Sequence[Type], op: Op, *over: str) -> Type:
    """The type of an op of this entry on these operands, which reduces over some dims, or adds
    them.
    """
    attrs = (("over", over),) if over else ()
    return entry.infer(program, types, Op(entry.name, (), (), attrs, span=op.span))[0]


def _logits(program: Program, op: Op, x: Type, weight: Type, labels: Type, *bias: Type) -> Type:
    product = _by(CONTRACT, program, (x, weight), op, *op.names("inner"))
    return _by(ADD, program, (product, *bias), op) if bias else product


def _linear_softmax_stats(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    check(op, *types)
    return _parts(program, _logits(program, op, *types), types[2], op)


def _chunk(local: Local) -> int:
    return sum(chunk(local, by_tokens=False))


def _sum_of_chunks(local: Local) -> int:
    """The gradient of x adds up in float32, each part rounded first; the gradients of weight and
    bias are made beside it.
    """
    weights = (1, *range(3, len(local.types)))
    logits, terms = chunk(local, by_tokens=False)
    part = local.bytes() if local.is_narrow else 0
    gradients = local.wide_bytes() + sum(map(local.bytes, weights))
    return gradients + logits + max(terms, part) - local.bytes()


def _gradients_work(local: Local) -> Work:
    """Logits are made once more, for the gradient of x; gradients of weights are made beside it."""
    of_weights = all(BATCH not in value.type.dims for value in local.op.outputs)
    if of_weights:
        return logits_work(local, of_w=1, passes=0)
    return logits_work(local, of_x=1)


# ---- the entries

OF_LOGITS = (
    "m, the largest; z = Σ exp(logit − m), one for each rank, in the dim `as`; t, the label's"
    " logit, or 0 for a label"
    " elsewhere, with smoothing as local_softmax_stats'."
)

LOGIT_PARTS = OpDef(
    "logit_softmax_stats",
    "Of this rank's classes, with logits cap · tanh(logit / cap), as they are where cap is 0:"
    f" {OF_LOGITS}",
    operands=takes("logits", "labels"),
    attributes=(SMOOTHING, CAP, SHARES),
    typing=_logit_softmax_stats,
    roles=last_is_classes,
    vjp=Vjp(result=True, workspace=partial(in_pass, back=True)),
    function="logit_softmax_stats",
    call=call_for_own_classes,
    saves=_saves,
    workspace=in_pass,
)
LINEAR_PARTS = OpDef(
    "linear_softmax_stats",
    f"Of this rank's classes, with logits as linear_cross_entropy's: {OF_LOGITS}",
    operands=PRODUCT,
    attributes=(INNER, *LOGIT_PARTS.attributes),
    typing=_linear_softmax_stats,
    roles=product_roles,
    vjp=Vjp(result=True, workspace=_sum_of_chunks, delayed=True, work=_gradients_work),
    function="linear_softmax_stats",
    call=product_call,
    saves=_saves,
    workspace=_chunk,
    work=logits_work,
)

# ---- rescaled to the largest logit of all ranks

CLASSES = Attribute("classes", kinds=(str,))


def _rescale_types(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    m, z, t, peak, labels = types
    axes = m.axes_in(Kind.MAXIMUM)
    summed = Type(m.dtype, m.dims, _places_on(program, m, axes, PARTIAL))
    largest = Type(m.dtype, m.dims, _places_on(program, m, axes, REPLICATED))
    has_shares = z.dims[:-1] == m.dims and z.axes_of(z.dims[-1]) == axes
    fits = has_shares and (t, peak) == (summed, largest) and labels.dims == m.dims
    if not axes or is_pending(m) or not fits:
        raise TypingError(f"{op.kind} takes a share of each rank, and the largest of all")
    return [summed] * 2


def _rescale_call(local: Local) -> Call:
    """How many of the classes each rank has."""
    classes, axes = str(local.op.get("classes")), local.types[0].axes_in(Kind.MAXIMUM)
    return over_classes(local, classes, axes, columns=Size(classes, axes))


REJOINED = OpDef(
    "rescale_to_global_max",
    "The results of linear_softmax_stats or logit_softmax_stats as local_softmax_stats gives"
    " them: z · exp(m − peak),"
    " and t less the peak times what the labels have of this rank's part of `classes`.",
    operands=takes("m", "z", "t", "peak", "labels"),
    attributes=(SMOOTHING, CLASSES),
    typing=_rescale_types,
    vjp=Vjp(wrt=(1, 2), unread=(1, 2)),
    function="rescale_to_global_max",
    call=_rescale_call,
    module=KERNELS,
    saves=lambda local: Saved(others=(("exp(m - peak)", local.bytes(0)),)),
)
