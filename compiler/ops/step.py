"""The ops of a training step around forward and backward: coercions, casts, counts, buckets,
clipping, update.
"""

import math
from collections.abc import Sequence

from ..ir import PARTIAL, Kind, Op, Placement, Program, Type, sharded
from ..ir.placements import Step, coercion_of, ends
from .call import Argument, Call, Dims, Group
from .line import Formula, Line
from .messages import Message, pieces
from .pointwise import same
from .protocol import Attribute, OpDef, TypingError, takes, total, wide
from .saved_tensors import Local, Saved
from .work import Work, no_work


def _coerce_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    source, target = ends(op)
    for axis in op.names("axes"):
        if types[0].placement_on(axis) != source:
            raise TypingError(
                f"coerce leads from {source} on {axis}, but its operand is"
                f" {types[0].placement_on(axis)}"
            )
    return [Step(op.names("axes"), source, target).type_after(types[0], program)]


_SILENT = ("replicate", "invariant")
"""Coercions to or from invariant, which return their operand."""


def _collective(local: Local) -> tuple[Message, ...]:
    """The message of the table, if the change of placement needs one; a stack of flat buffers is
    sent in one message.
    """
    op, (source,) = local.op, local.types
    collective = coercion_of(op).collective
    if not collective:
        return ()
    message = Message(
        collective,
        op.outputs[0].name,
        op.names("axes"),
        source.dtype,
        _message_shape(local),
        ragged="all" if local.program.is_ragged(source) else "",
        maximum=ends(op)[0].kind is Kind.MAXIMUM,
        among=tuple(map(int, op.names("among"))),
    )
    return (message,)


def _message_shape(local: Local) -> tuple[int, ...]:
    """The shape of what the runtime sends: an exchange in pieces, a gather or a scatter with its
    dim first.

    Flat buffers are sent as they are.
    """
    (source, target), (type,) = ends(local.op), local.types
    shape, moved = local.program.local_shape(type), target.dim or source.dim
    if not moved or moved in {bucket.dim for bucket in local.program.buckets}:
        return shape
    if source.dim and target.dim:
        return pieces(local.program, type, moved, local.op.names("axes"))
    place = local.program.place_of(type, moved)
    return (shape[place], *shape[:place], *shape[place + 1 :])


def _coercion_call(local: Local) -> Call:
    """The group of ranks, the dims that are gathered or scattered, and whether ranks hold two
    chunks each of them.
    """
    source, target = ends(local.op)
    axes = local.op.names("axes")
    group = (Group(axes),)
    dim = source.dim or target.dim
    zigzag = bool(local.program.zigzag_axes(dim, axes))
    if source.dim and target.dim:
        assert not zigzag, "emit: an exchange of chunks"
        return Call(group, {"dim_from": Dims((source.dim,)), "dim_to": Dims((target.dim,))})
    options: dict[str, Argument] = {}
    if dim:
        options["dim"] = Dims((dim,))
        if zigzag:
            options["zigzag"] = True
    elif source.kind is Kind.MAXIMUM:
        options["op"] = "max"
    return Call(group, options)


def _own_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """The result's own type: there is no operand that it would follow from."""
    return [op.outputs[0].type]


def _own_type_of_same_dims(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """The result's own type: a chain of coercions not yet chosen, or a constant."""
    result = op.outputs[0].type
    if result.dims != types[0].dims:
        raise TypingError(f"{op.kind} keeps dims, but {result.dims} are not {types[0].dims}")
    return [result]


def _reciprocal(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    if types[0].axes_in(Kind.PARTIAL):
        raise TypingError("reciprocal takes a count that is reduced")
    return [Type(str(op.get("dtype")), (), types[0].places)]


def _float32_number(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    return [Type("f32", ())]


def _count_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """The count; all ranks hold the same count, and the same values that decide on it."""
    if any(type.places for type in types):
        raise TypingError(f"{op.kind} takes a count, a norm and a loss that are reduced")
    return [types[0]]


def _sum_squares_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """Pending over the axes on which operands are sharded, and over the ranks of a pipeline's
    stages.

    Each operand is summed by itself; every rank would count an operand that is not sharded as the
    others are.
    """
    places: dict[str, Placement] = {}
    for axis in (axis.name for axis in program.axes):
        kinds = {type.placement_on(axis).kind for type in types}
        if kinds & {Kind.PARTIAL, Kind.REPLICATED}:
            raise TypingError(f"sum_squares is not linear in what is partial on {axis}")
        if len(kinds) > 1:
            raise TypingError(f"sum_squares needs its operands sharded alike on {axis}")
        if kinds == {Kind.SHARDED} or axis == dict(op.attrs).get("stages"):
            places[axis] = PARTIAL
    return [Type(wide(types[0].dtype), (), program.places(places))]


def _pack_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """One flat dim, sharded over the axes over which every part is, with the parts' pending
    sums; stacks stay.
    """
    bucket = program.bucket(str(op.get("bucket")))
    first = types[0]
    layouts: set[tuple[tuple[str, Kind], ...]] = set()
    for type in types:
        layouts.add(tuple((axis, place.kind) for axis, place in type.places))
    if len(layouts) != 1 or len({type.dtype for type in types}) != 1:
        raise TypingError("pack takes values of one placement and element type")
    places: dict[str, Placement] = {}
    for axis, place in first.places:
        places[axis] = sharded(bucket.dim) if place.kind is Kind.SHARDED else place
    is_stacked = first.dims[: len(bucket.layers)] == bucket.layers
    dims = (*bucket.layers, bucket.dim) if is_stacked else (bucket.dim,)
    return [Type(first.dtype, dims, program.places(places))]


def _unpack_types(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """Each part's own type: split over the axes over which the flat buffer is, and otherwise
    placed as it is.
    """
    (flat,) = types
    kinds = {axis: place.kind for axis, place in flat.places}
    for value in op.outputs:
        part_kinds = {axis: place.kind for axis, place in value.type.places}
        if value.type.dtype != flat.dtype or part_kinds != kinds:
            raise TypingError(
                "unpack gives values of the placement and element type of its operand"
            )
    return [value.type for value in op.outputs]


def _update_types(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """The parameters (operands after gradient, scale and count), in their state of record."""
    if any(type.axes_in(Kind.PARTIAL) for type in types):
        raise TypingError("update takes gradients that are reduced")
    return list(types[3:])


def _balance_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """The biases, by a load of all ranks: a row for each row of the biases."""
    bias, load, _ = types
    same_sizes = [*map(program.size, bias.dims)] == [*map(program.size, load.dims)]
    if any(type.places for type in types) or not same_sizes:
        raise TypingError(
            "balanced takes biases and a load of as many rows, and a count, that are reduced"
        )
    return [bias]


def _update_work(local: Local) -> Work:
    """Reads a gradient, reads and writes a master and the optimizer's state, of each parameter
    of the rank's share.
    """
    return Work(bytes=(3 + 2 * len(local.program.train.optimizer.slots)) * local.bytes())


def _pack_work(local: Local) -> Work:
    """The work of making zeros that gradients are added to, in the type of their sums; parameters
    stay where they are.
    """
    if local.op.inputs[0] in {param.name for param in local.program.params_and_buffers}:
        return Work(kernels=0)
    return Work(bytes=local.program.elements(local.op.outputs[0].type) * local.wide)


def _root_of_sum(*squares: float) -> float:
    return math.sqrt(sum(squares))


def _unscaled_root(loss_scale: float, *squares: float) -> float:
    return math.sqrt(sum(squares)) / loss_scale


def _clip_line(program: Program, op: Op) -> Line:
    """No call where there is no clipping."""
    if not op.get("max"):
        return Line(Formula("1", lambda norm: 1))
    return Line(Formula("clip_scale({norm}, {max})"))


def _is_finite(count: int, norm: float, loss: float) -> bool:
    return math.isfinite(norm) and math.isfinite(loss)


def _finite_line(program: Program, op: Op) -> Line:
    """With a loss scale, a norm that is not finite is an overflow: the scale adapts to it."""
    skip = Formula("{count} == 0", lambda count, norm, loss: count == 0)
    if program.train.precision != "fp16":
        return Line(
            Formula("{loss}.isfinite() & {norm}.isfinite()", _is_finite),
            target="finite",
            comment="otherwise nothing is updated",
            conditions={"skip": skip},
        )
    overflow = Formula("~{norm}.isfinite()", lambda count, norm, loss: not math.isfinite(norm))
    return Line(
        Formula("{loss}.isfinite()", lambda count, norm, loss: math.isfinite(loss)),
        conditions={"skip": skip, "overflow": overflow},
    )


def _update_line(program: Program, op: Op) -> Line:
    """One call updates all buckets; it scales gradients too, if they are clipped or have a loss
    scale.
    """
    is_scaled = program.train.optimizer.clip or program.train.precision == "fp16"
    scale = "scale={scale}, " if is_scaled else ""
    return Line(Formula(f"state.update(lr, {scale}{{conditions}})"), target="")


DTYPE = Attribute("dtype", kinds=(str,))
BUCKET = Attribute("bucket", kinds=(str,))

COERCE = OpDef(
    "coerce",
    "Changes a value's placement over a group of ranks; `placements` has the table.",
    operands=takes("x"),
    attributes=(
        Attribute("axes", kinds=(tuple,)),
        Attribute("from", kinds=(Placement,)),
        Attribute("to", kinds=(Placement,)),
        Attribute("among", kinds=(tuple,), default=()),
    ),
    typing=_coerce_type,
    views=lambda program, op: (
        coercion_of(op).function in _SILENT or program.degree(op.names("axes")) == 1
    ),
    communicates=_collective,
    call=_coercion_call,
    work=no_work,
)

CAST = OpDef(
    "cast",
    "Changes the element type.",
    operands=takes("x"),
    attributes=(DTYPE,),
    linear=((0,),),
    typing=lambda program, types, op: [Type(str(op.get("dtype")), types[0].dims, types[0].places)],
    adjoint=lambda op, grads, b: b.emit("cast", grads, op.inputs, dtype=b.type(op.inputs[0]).dtype),
    saves=lambda local: Saved(),
)

ONE = OpDef(
    "one",
    "The number one, as the result says.",
    typing=_own_type,
    line=lambda program, op: Line(Formula("1.0", lambda: 1)),
)

ZEROS = OpDef(
    "zeros", "Zeros of the shape and the placement that the result says.", typing=_own_type
)

LEAF = OpDef(
    "leaf",
    "A parameter as the model uses it: the chain from its state of record is chosen later.",
    operands=takes("param"),
    typing=_own_type_of_same_dims,
    work=no_work,
)

LEAF_GRAD = OpDef(
    "leaf_grad",
    "A leaf's gradient as the update takes it: the conjugate of the chain.",
    operands=takes("grad"),
    typing=_own_type_of_same_dims,
    work=no_work,
)

COUNT_VALID = OpDef(
    "count_valid",
    "The number of labels that are not negative.",
    lambda types, op: [("i64", ())],
    operands=takes("labels"),
    function="count_valid",
    line=lambda program, op: Line(
        Formula("count_valid({labels})"),
        target="num_tokens",
        comment="tokens with a label, over all ranks",
        in_evaluation=True,
    ),
)

RECIPROCAL = OpDef(
    "reciprocal",
    "1 / max(count, 1).",
    operands=takes("count"),
    attributes=(DTYPE,),
    typing=_reciprocal,
    line=lambda program, op: Line(
        Formula("{count}.clamp(min=1).to({dtype}).reciprocal()", lambda count: 1 / max(count, 1)),
        target="inv_num_tokens",
        in_evaluation=True,
    ),
)

PACK = OpDef(
    "pack",
    "Parameters or gradients as one flat buffer: views, not copies.",
    operands=takes("grad"),
    variadic=True,
    attributes=(BUCKET,),
    typing=_pack_type,
    work=_pack_work,
)

UNPACK = OpDef(
    "unpack",
    "The parameters of a bucket, of its flat buffer: views, not copies.",
    operands=takes("flat"),
    attributes=(BUCKET,),
    typing=_unpack_types,
    work=no_work,
)

BEGIN = OpDef(
    "begin",
    "In the last microbatch, the reduction of a bucket begins here; it is complete where its"
    " coercion is.",
    operands=takes("grad"),
    variadic=True,
    attributes=(BUCKET,),
    typing=lambda program, types, op: [],
    work=no_work,
)

SUM_SQUARES = OpDef(
    "sum_squares",
    "The sum of squares of all elements that a rank holds; of those that ranks hold alike,"
    " `once`, on the first.",
    operands=takes("grad"),
    variadic=True,
    attributes=(
        Attribute("stages", kinds=(str,), default=""),
        Attribute("once", kinds=(tuple,), default=()),
    ),
    typing=_sum_squares_type,
    function="sum_squares",
)

GRAD_NORM = OpDef(
    "grad_norm",
    "The root of the sum of the operands.",
    total,
    operands=takes("squares"),
    variadic=True,
    line=lambda program, op: Line(Formula("{squares}.sqrt()", _root_of_sum), target="grad_norm"),
)

UNSCALED_NORM = OpDef(
    "unscaled_norm",
    "The root of the sum of the operands after the first, divided by the first, the loss scale.",
    total,
    operands=takes("loss_scale", "squares"),
    variadic=True,
    line=lambda program, op: Line(
        Formula(
            "{squares}.sqrt() / {loss_scale}",
            _unscaled_root,
        ),
        target="grad_norm",
    ),
)

CLIP_SCALE = OpDef(
    "clip_scale",
    "min(1, max / norm); 1 where max is 0, which is no clipping.",
    same,
    operands=takes("norm"),
    attributes=(Attribute("max"),),
    function="clip_scale",
    line=_clip_line,
)

LOSS_SCALE = OpDef(
    "loss_scale",
    "The loss scale that the state keeps, a power of two: the gradient from which backward"
    " begins is multiplied by it, "
    "so that float16 holds what follows (Micikevicius et al. 2018).",
    typing=_float32_number,
    line=lambda program, op: Line(
        Formula("state.loss_scale()"),
        target="scale",
        comment="multiplies gradients so that float16 can hold them",
        metric="loss_scale",
    ),
)

UNSCALED = OpDef(
    "unscaled",
    "x / loss_scale.",
    same,
    operands=takes("x", "loss_scale"),
    line=lambda program, op: Line(
        Formula("{x} / {loss_scale}", lambda x, loss_scale: x / loss_scale)
    ),
)

IF_FINITE = OpDef(
    "if_finite",
    "The count, or 0 where the norm or the loss is not finite, and from then on until the run"
    " goes on by rule; "
    "with a loss scale a norm that is not finite is that of this step alone.",
    operands=takes("count", "norm", "loss"),
    typing=_count_type,
    line=_finite_line,
)

LOSS_LIMIT = OpDef(
    "loss_limit",
    "The most that a loss may be, which the run gives each step by the losses before it: their"
    " median, and as many "
    "median deviations above it (Hampel 1974); no limit while there are few.",
    attributes=(Attribute("deviations"),),
    typing=_float32_number,
    line=lambda program, op: Line(
        Formula("state.loss_limit({deviations})"),
        target="limit",
        comment="from the losses of earlier steps; a loss above it is a spike",
        metric="limit",
    ),
)

IF_BELOW = OpDef(
    "if_below",
    "The count, or 0 where the loss is above the limit, as of a step that is not finite.",
    operands=takes("count", "loss", "limit"),
    typing=_count_type,
    line=lambda program, op: Line(
        Formula(
            "{count} & ({loss} <= {limit})", lambda count, loss, limit: count and loss <= limit
        ),
        target="usual",
    ),
)

BALANCED = OpDef(
    "balanced",
    "bias + rate · sign(mean of its row of the load − load), which evens loads out (Wang et"
    " al. 2024); "
    "nothing where count is 0.",
    operands=takes("bias", "load", "count"),
    attributes=(Attribute("rate"),),
    typing=_balance_type,
    line=lambda program, op: Line(
        Formula("state.balance({bias}, {load}, rate={rate}, {conditions})"), target=""
    ),
)

UPDATE = OpDef(
    "update",
    "The optimizer's step: scaled gradients to new parameters; nothing where count is 0.",
    operands=takes("grad", "scale", "count", "param"),
    variadic=True,
    typing=_update_types,
    line=_update_line,
    work=_update_work,
)
