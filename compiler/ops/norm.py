"""Normalisation over the trailing dims; over a sharded one as a small sum over ranks and a product.

No rank ever holds all of a dim that is sharded: what each needs of the others is one number for each token, and so is
what its gradient needs.
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from ..ir import Attr, Op, Type, Value
from .loss import wide
from .pointwise import same
from .protocol import Attribute, Builder, OpDef, Operand, Shape, Shapes, TypingError, missing, takes
from .reduce import OVER
from .saved_tensors import Bytes, Local, Saved, no_bytes

EPS = Attribute("eps")


def _normed(types: Sequence[Type], op: Op) -> list[Shape]:
    x, weight, *bias = types
    if x.dims[-len(weight.dims) :] != weight.dims:
        raise TypingError(
            f"{op.kind} normalises the last dims, but [{', '.join(x.dims)}] does not end in those of its weight"
        )
    if any(other.dims != weight.dims for other in bias):
        raise TypingError(f"{op.kind} takes a bias of the dims of its weight")
    return same(types, op)


def _weight_dims(types: Sequence[Type], op: Op) -> frozenset[str]:
    return frozenset(types[1].dims)


def _like_weight(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[1].dtype, types[1].dims)]


def _adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    (dy,), (x, weight, *bias), eps = grads, op.inputs, op.get("eps")
    back = [dy, b.saved(weight), b.saved(x)]
    dx = b.emit(f"{op.kind}_dx", back, [x], eps=eps)[0] if b.wanted(x) else None
    return [dx, *weight_gradients(op.kind, dy, x, (weight, *bias), eps, b)]


def weight_gradients(kind: str, dy: str, x: str, weights: Sequence[str], eps: Attr, b: Builder) -> list[str | None]:
    """Those of a norm's weight and, where it has one, of its bias."""
    weight, *bias = weights
    back = [dy, b.saved(weight), b.saved(x)]
    dw = b.emit(f"{kind}_dw", back, [weight], eps=eps)[0] if b.wanted(weight) else None
    return [dw, *(b.emit("sum", [dy], [name], over=missing(b.type(name), b.type(x)))[0] for name in bias)]


# ---- over a sharded dim


def _token(x: Type, weight: Type, dtype: str) -> Type:
    """The type of what there is one of for each token."""
    return Type(dtype, x.dims[: len(x.dims) - len(weight.dims)])


def _expand(op: Op, fresh: Callable[[str], str], type_of: Callable[[str], Type]) -> list[Op]:
    """rmsnorm: a mean of squares, which is a sum over ranks, and the product that it goes into."""
    x, weight = (type_of(name) for name in op.inputs[:2])
    work, span = ("work", op.names("work")), op.span
    square = Value(fresh("square"), _token(x, weight, wide(x.dtype)))
    return [
        Op("mean_square", op.inputs[:1], (square,), (("over", weight.dims), work), span=span),
        Op("rms_scaled", (*op.inputs[:2], square.name), op.outputs, (("eps", op.get("eps")), work), span=span),
    ]


def _expand_layernorm(op: Op, fresh: Callable[[str], str], type_of: Callable[[str], Type]) -> list[Op]:
    """layernorm: rmsnorm of x less its mean, plus the bias.  (The mean of x² less the mean, squared, would cancel.)"""
    (x, weight, *bias), work, span = op.inputs, ("work", op.names("work")), op.span
    full, over = type_of(x), type_of(weight).dims
    mean, minus = (Value(fresh("_mean"), _token(full, type_of(weight), full.dtype)) for _ in range(2))
    centred, scaled = Value(fresh("centred"), full), Value(fresh("_n"), full) if bias else op.outputs[0]
    known = {centred.name: full, weight: type_of(weight)}
    inner = evolve(op, inputs=(centred.name, weight), outputs=(scaled,))
    last = [Op("add", (scaled.name, *bias), op.outputs, (work,), span=span)] if bias else []
    return [
        Op("mean", (x,), (mean,), (("over", over), work), span=span),
        Op("scale", (mean.name,), (minus,), (("by", -1.0), work), span=span),
        Op("add", (x, minus.name), (centred,), (work,), span=span),
        *_expand(inner, fresh, known.__getitem__),
        *last,
    ]


def _square_mean(types: Sequence[Type], op: Op) -> list[Shape]:
    x = types[0]
    return [(wide(x.dtype), tuple(dim for dim in x.dims if dim not in op.names("over")))]


def _mean_square_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    x = op.inputs[0]
    return [b.emit("mean_square_dx", [*grads, b.saved(x)], [x])[0]]


def _like_x(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[1].dtype, types[1].dims)]


def _scaled_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """In x it is linear: its gradient is the same op on dy."""
    (dy,), (x, weight, square), eps = grads, op.inputs, op.get("eps")
    w, s = b.saved(weight), b.saved(square)
    back = [dy, w, b.saved(x), s]
    return [
        b.emit("rms_scaled", [dy, w, s], [x], eps=eps)[0],
        b.emit("rms_scaled_dw", back, [weight], eps=eps)[0],
        b.emit("rms_scaled_dsquare", back, [square], eps=eps)[0],
    ]


def _scaled_by(types: Sequence[Type], op: Op) -> list[Shape]:
    x, weight, square = types
    if x.dims != (*square.dims, *weight.dims):
        raise TypingError(f"{op.kind} takes one mean of squares for each token")
    return same(types, op)


def _like_square(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[3].dtype, types[3].dims)]


# ---- what autograd keeps


def _rows(it: Local) -> int:
    """How often an op normalises."""
    return it.elements(0) // it.elements(1)


def _rms_saves(it: Local) -> Saved:
    """On CUDA one kernel, as Triton's; on the CPU torch composes it, of x in float32 at least."""
    root = ("1 / rms", _rows(it) * it.wide)
    if it.device == "cuda" or it.kernels:
        return Saved(operands=(0, 1), others=(root,))
    normed = ("x / rms", it.widened())
    if it.widened() == it.bytes():
        return Saved(operands=(0, 1), others=(root, normed))
    return Saved(operands=(1,), others=(("x in f32", it.widened()), root, normed))


def _layer_saves(it: Local) -> Saved:
    """Mean and deviation of each row, on the CPU in x's own element type."""
    own = it.device == "cpu" and not it.kernels
    each = _rows(it) * (it.bytes() // it.elements() if own else it.wide)
    return Saved(operands=tuple(range(len(it.types))), others=(("mean", each), ("1 / deviation", each)))


PROGRAMS = 296 * 8192
"""Elements of the sums that the programs of a norm's backward make for its weight, by whatever tile, at most."""


def norm_scratch(it: Local) -> int:
    """What scalec's own norms hold, forward: in plain torch x, its square or its difference from the mean."""
    if not it.kernels or it.launched:
        return 0
    centred = it.op.kind.endswith("layernorm")
    return (3 if centred else 2 + it.is_narrow) * it.widened() - it.bytes()


def norm_dx_scratch(it: Local) -> int:
    """Backward: sums for the weight, and perhaps for a bias, or in plain torch products of dy and x by rows."""
    if not it.kernels:
        return 0
    if it.launched:
        return min(it.elements(), PROGRAMS) * it.wide * (2 if "layernorm" in it.op.kind else 1)
    return (5 + 2 * it.is_narrow) * it.widened() - it.bytes()


def _square_saves(it: Local) -> Saved:
    return Saved(operands=(0,)) if it.widened() == it.bytes() else Saved(others=(("x in f32", it.widened()),))


def _scaled_saves(it: Local) -> Saved:
    """The square itself is not needed, its root is; the product of x and that is in the square's element type."""
    return Saved(operands=(0, 1), others=(("1 / rms", it.bytes(2)), ("x / rms", it.widened())))


# ---- the entries


def _norm_gradient(name: str, doc: str, shapes: Shapes, scratch: Bytes = no_bytes) -> OpDef:
    """Of the whole dims of a norm, linear in dy."""
    operands = takes("dy", "weight", "x")
    return OpDef(name, doc, shapes, operands, attributes=(EPS,), linear=((0,),), whole=_weight_dims, scratch=scratch)


def _scaled_gradient(name: str, doc: str, shapes: Shapes) -> OpDef:
    """Of rms_scaled, linear in dy and in x."""
    operands = takes("dy", "weight", "x", "square")
    return OpDef(name, doc, shapes, operands, attributes=(EPS,), linear=((0,), (2,)))


RMSNORM = OpDef(
    "rmsnorm",
    "x · weight / sqrt(mean(x²) + eps), the mean over the weight's dims (Zhang and Sennrich 2019).",
    _normed,
    operands=(Operand("x"), Operand("weight", init="ones")),
    attributes=(EPS,),
    whole=_weight_dims,
    adjoint=_adjoint,
    expand=_expand,
    function="rms_norm",
    stem="n",
    saves=_rms_saves,
    scratch=norm_scratch,
    surface=True,
)
RMSNORM_DX = _norm_gradient("rmsnorm_dx", "The gradient of rmsnorm's operand.", same, norm_dx_scratch)
RMSNORM_DW = _norm_gradient("rmsnorm_dw", "The gradient of rmsnorm's weight.", _like_weight)

LAYERNORM = OpDef(
    "layernorm",
    "(x − mean(x)) · weight / sqrt(var(x) + eps) + bias, mean and variance over the weight's dims (Ba et al. 2016).",
    _normed,
    operands=(Operand("x"), Operand("weight", init="ones"), Operand("bias", init="zeros", optional=True)),
    attributes=(EPS,),
    whole=_weight_dims,
    adjoint=_adjoint,
    expand=_expand_layernorm,
    function="layer_norm",
    stem="n",
    saves=_layer_saves,
    scratch=norm_scratch,
    surface=True,
)
LAYERNORM_DX = _norm_gradient("layernorm_dx", "The gradient of layernorm's operand.", same, norm_dx_scratch)
LAYERNORM_DW = _norm_gradient("layernorm_dw", "The gradient of layernorm's weight.", _like_weight)

MEAN_SQUARE = OpDef(
    "mean_square",
    "The sum of x² over the dims `over`, divided by the product of their global sizes.",
    _square_mean,
    operands=takes("x"),
    attributes=(OVER,),
    adjoint=_mean_square_adjoint,
    function="mean_square",
    saves=_square_saves,
)

MEAN_SQUARE_DX = OpDef(
    "mean_square_dx",
    "The gradient of mean_square's operand: 2 · x · dy, divided by the sizes of the dims that dy lacks.",
    _like_x,
    operands=takes("dy", "x"),
    linear=((0,),),
)

RMS_SCALED = OpDef(
    "rms_scaled",
    "x · weight / sqrt(square + eps).",
    _scaled_by,
    operands=takes("x", "weight", "square"),
    attributes=(EPS,),
    linear=((0,),),
    adjoint=_scaled_adjoint,
    function="rms_scaled",
    saves=_scaled_saves,
)
RMS_SCALED_DW = _scaled_gradient("rms_scaled_dw", "The gradient of rms_scaled's weight.", _like_weight)
RMS_SCALED_DSQUARE = _scaled_gradient("rms_scaled_dsquare", "The gradient of its mean of squares.", _like_square)
