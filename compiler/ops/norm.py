"""Normalisation over the trailing dims; over a sharded one as a small sum over ranks and a product.

No rank ever has all of a sharded dim: each needs one number per token from the others, and one more
for the gradient.
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from ..ir import Op, Type, Value
from .pointwise import same
from .protocol import Attribute, OpDef, Operand, Shape, TypingError, Vjp, takes, wide
from .reduce import OVER, mean_over_dims
from .saved_tensors import Local, Saved

EPS = Attribute("eps", range=(lambda value: value >= 0, "0 or above"))


def _norm_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    x, weight, *bias = types
    if x.dims[-len(weight.dims) :] != weight.dims:
        raise TypingError(
            f"{op.kind} normalises the last dims, but [{', '.join(x.dims)}] does not end in"
            " those of its weight"
        )
    if any(other.dims != weight.dims for other in bias):
        raise TypingError(f"{op.kind} takes a bias of the dims of its weight")
    return same(types, op)


def _weight_dims(types: Sequence[Type], op: Op) -> frozenset[str]:
    return frozenset(types[1].dims)


# ---- over a sharded dim


def _token(x: Type, weight: Type, dtype: str) -> Type:
    """The type of one number for each token: it has the dims of x before the weight's."""
    return Type(dtype, x.dims[: len(x.dims) - len(weight.dims)])


def _expand(op: Op, fresh: Callable[[str], str], type_of: Callable[[str], Type]) -> list[Op]:
    """rmsnorm: a mean of squares, which is a sum over ranks, and the product that it goes into."""
    x, weight = type_of(op.inputs[0]), type_of(op.inputs[1])
    work, span = ("work", op.names("work")), op.span
    square = Value(fresh("square"), _token(x, weight, wide(x.dtype)))
    return [
        Op("mean_square", op.inputs[:1], (square,), (("over", weight.dims), work), span=span),
        Op(
            "rms_scaled",
            (*op.inputs[:2], square.name),
            op.outputs,
            (("eps", op.get("eps")), work),
            span=span,
        ),
    ]


def _expand_layernorm(
    op: Op, fresh: Callable[[str], str], type_of: Callable[[str], Type]
) -> list[Op]:
    """layernorm: rmsnorm of x less its mean, plus the bias.

    (The mean of x² less the mean, squared, would cancel.)
    """
    (x, weight, *bias), work, span = op.inputs, ("work", op.names("work")), op.span
    full, over = type_of(x), type_of(weight).dims
    token = _token(full, type_of(weight), full.dtype)
    mean = Value(fresh("_mean"), token)
    minus = Value(fresh("_mean"), token)
    centred = Value(fresh("centred"), full)
    scaled = Value(fresh("_n"), full) if bias else op.outputs[0]
    types_by_name = {centred.name: full, weight: type_of(weight)}
    inner = evolve(op, inputs=(centred.name, weight), outputs=(scaled,))
    ops = [
        Op("mean", (x,), (mean,), (("over", over), work), span=span),
        Op("scale", (mean.name,), (minus,), (("by", -1.0), work), span=span),
        Op("add", (x, minus.name), (centred,), (work,), span=span),
        *_expand(inner, fresh, types_by_name.__getitem__),
    ]
    if bias:
        ops.append(Op("add", (scaled.name, *bias), op.outputs, (work,), span=span))
    return ops


def _square_mean(types: Sequence[Type], op: Op) -> list[Shape]:
    x = types[0]
    return [(wide(x.dtype), tuple(dim for dim in x.dims if dim not in op.names("over")))]


def _square_mean_saves(local: Local) -> Saved:
    """x, or the copy of it in float32 that torch makes of fewer bits."""
    if local.wide_bytes() == local.bytes():
        return Saved(operands=(0,))
    return Saved(others=(("x in f32", local.wide_bytes()),))


def _rms_scaled_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    x, weight, square = types
    if x.dims != (*square.dims, *weight.dims):
        raise TypingError(f"{op.kind} takes one mean of squares for each token")
    return same(types, op)


# ---- what autograd keeps


def _rows(local: Local) -> int:
    """How often an op normalises."""
    return local.elements(0) // local.elements(1)


def _rms_saves(local: Local) -> Saved:
    """On CUDA there is one kernel, as Triton's; on the CPU torch composes it, of x in float32 at
    least.
    """
    root = ("1 / rms", _rows(local) * local.wide)
    if local.device == "cuda" or local.kernels:
        return Saved(operands=(0, 1), others=(root,))
    normed = ("x / rms", local.wide_bytes())
    if local.wide_bytes() == local.bytes():
        return Saved(operands=(0, 1), others=(root, normed))
    return Saved(operands=(1,), others=(("x in f32", local.wide_bytes()), root, normed))


def _layer_saves(local: Local) -> Saved:
    """Mean and deviation of each row, on the CPU in x's own element type."""
    item = local.wide
    if local.device == "cpu" and not local.kernels:
        item = local.bytes() // local.elements()
    numbers = _rows(local) * item
    return Saved(
        operands=tuple(range(len(local.types))),
        others=(("mean", numbers), ("1 / deviation", numbers)),
    )


PROGRAMS = 296 * 8192
"""Elements of the sums that the programs of a norm's backward make for its weight, by whatever
tile, at most.
"""


def norm_workspace(local: Local) -> int:
    """The workspace of scalec's own norms, forward: in plain torch x, its square or its
    difference from the mean.
    """
    if not local.kernels or local.runs_kernel:
        return 0
    terms = 2 + local.is_narrow
    if local.op.kind.endswith("layernorm"):  # of x less its mean
        terms = 3
    return terms * local.wide_bytes() - local.bytes()


def norm_vjp_workspace(local: Local) -> int:
    """Backward: sums for the weight, and perhaps for a bias, or in plain torch products of dy and x
    by rows.

    The RMSNorm that torch composes on the CPU has five products; dy, x / rms and the gradient of x
    are counted among them.
    """
    if not local.kernels:
        if local.device == "cpu" and local.op.kind == RMSNORM.name:
            return 4 * local.wide_bytes() - 2 * local.bytes()
        return 0
    if local.runs_kernel:
        sums = 2 if local.op.kind == LAYERNORM.name else 1
        return min(local.elements(), PROGRAMS) * local.wide * sums
    return (5 + 2 * local.is_narrow) * local.wide_bytes() - local.bytes()


# ---- the entries


RMSNORM = OpDef(
    "rmsnorm",
    "x · weight / sqrt(mean(x²) + eps), the mean over the weight's dims (Zhang and Sennrich 2019).",
    _norm_shape,
    operands=(Operand("x"), Operand("weight", init="ones")),
    attributes=(EPS,),
    unsharded_dims=_weight_dims,
    vjp=Vjp(workspace=norm_vjp_workspace),
    expand=_expand,
    function="rms_norm",
    torch="rms_norm",
    stem="n",
    saves=_rms_saves,
    workspace=norm_workspace,
    user_visible=True,
)

LAYERNORM = OpDef(
    "layernorm",
    "(x − mean(x)) · weight / sqrt(var(x) + eps) + bias, mean and variance over the weight's"
    " dims (Ba et al. 2016).",
    _norm_shape,
    operands=(
        Operand("x"),
        Operand("weight", init="ones"),
        Operand("bias", init="zeros", optional=True),
    ),
    attributes=(EPS,),
    unsharded_dims=_weight_dims,
    vjp=Vjp(unread=(2,), workspace=norm_vjp_workspace),
    expand=_expand_layernorm,
    function="layer_norm",
    torch="layer_norm",
    stem="n",
    saves=_layer_saves,
    workspace=norm_workspace,
    user_visible=True,
)

MEAN_SQUARE = OpDef(
    "mean_square",
    "The sum of x² over the dims `over`, divided by the product of their global sizes.",
    _square_mean,
    operands=takes("x"),
    attributes=(OVER,),
    vjp=Vjp(),
    function="mean_square",
    torch="mean_square",
    call=mean_over_dims,
    saves=_square_mean_saves,
)

RMS_SCALED = OpDef(
    "rms_scaled",
    "x · weight / sqrt(square + eps).",
    _rms_scaled_shape,
    operands=takes("x", "weight", "square"),
    attributes=(EPS,),
    linear=((0,),),
    vjp=Vjp(),
    function="rms_scaled",
    torch="rms_scaled",
    saves=lambda local: Saved(
        (0, 1), others=(("1 / rms", local.bytes(2)), ("x / rms", local.wide_bytes()))
    ),
)
