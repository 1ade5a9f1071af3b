"""Ops that do the work of several in one pass over memory, or in one product: what `fuse_ops` puts in their place.

What each is made of is its meaning.  Operands alone are kept for backward, which makes what lies between again.
Non-goals: where they stand (`passes.fuse_ops`); the head with its loss (`head`).
"""

from collections.abc import Sequence
from math import prod

from ..ir import ITEM_BYTES, Op, Program, Type
from .algebra import CONTRACT
from .norm import EPS, LAYERNORM, RMSNORM, norm_dx_scratch, norm_scratch, weight_gradients
from .pointwise import FUNCTIONS, same
from .protocol import Attribute, Builder, OpDef, Shape, TypingError, takes
from .saved_tensors import Local, Saved, operands

# ---- a sum and its norm


def _sum_and_norm(types: Sequence[Type], op: Op) -> list[Shape]:
    x, y, weight, *_ = types
    if (x.dtype, x.dims) != (y.dtype, y.dims) or x.dims[-len(weight.dims) :] != weight.dims:
        raise TypingError(f"{op.kind} takes two values of the same dims, which end in those of its weight")
    return [(x.dtype, x.dims)] * 2


def _normed(types: Sequence[Type], op: Op) -> frozenset[str]:
    """Of a sum and its norm, and of its gradient, the weight stands third."""
    return frozenset(types[2].dims)


def _sum_and_norm_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """Both terms have the gradient of their sum: its own, and what comes through the norm."""
    (d_sum, d_norm), (x, _, *weights), total = grads, op.inputs, op.outputs[0].name
    back, eps = [d_sum, d_norm, b.saved(weights[0]), b.saved(total)], op.get("eps")
    (dx,) = b.emit(f"{op.kind}_dx", back, [x], eps=eps)
    return [dx, dx, *weight_gradients(op.kind.removeprefix("add_"), d_norm, total, weights, eps, b)]


def _like_sum(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(types[3].dtype, types[3].dims)]


def _norm_saves(it: Local) -> Saved:
    """The sum, the weights, and a number or two for each row."""
    rows = it.elements(0) // it.elements(2) * it.wide
    mean = (("mean", rows),) if it.op.kind == "add_layernorm" else ()
    return Saved(operands=(2,), results=(0,), others=(*mean, ("1 / deviation", rows)))


def _added(norm: OpDef) -> tuple[OpDef, OpDef]:
    """A norm of a sum that is used itself too, and the gradient of the sum's terms."""
    entry = OpDef(
        f"add_{norm.name}",
        f"The sum of two values, and its {norm.name}.",
        _sum_and_norm,
        operands=(*takes("x", "y"), *norm.operands[1:]),
        attributes=(EPS,),
        whole=_normed,
        adjoint=_sum_and_norm_adjoint,
        function=f"add_{norm.function}",
        saves=_norm_saves,
        scratch=norm_scratch,
    )
    slope = OpDef(
        f"add_{norm.name}_dx",
        f"The gradient of each term of add_{norm.name}: that of the sum, and what comes through its norm.",
        _like_sum,
        operands=takes("d_sum", "d_norm", "weight", "sum"),
        attributes=(EPS,),
        linear=((0, 1),),
        whole=_normed,
        scratch=norm_dx_scratch,
    )
    return entry, slope


# ---- several products of one value


def _products(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    x, *weights = types
    single = Op(CONTRACT.name, (), (), (("over", op.names("over")),), span=op.span)
    return [CONTRACT.infer(program, (x, weight), single)[0] for weight in weights]


def _sum_of_products(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    grads, weights = types[: len(types) // 2], types[len(types) // 2 :]
    found = [_product(program, *pair, op) for pair in zip(grads, weights, strict=True)]
    if len({*found}) != 1:
        raise TypingError(f"{op.kind} adds gradients that lie differently: {', '.join(map(str, found))}")
    return found[:1]


def _product(program: Program, grad: Type, weight: Type, op: Op) -> Type:
    """The input's part of the gradient of one product."""
    outer = tuple(dim for dim in weight.dims if dim not in op.names("inner"))
    single = Op(CONTRACT.name, (), (), (("over", outer),), span=op.span)
    return CONTRACT.infer(program, (grad, weight), single)[0]


def _products_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    x, *weights = op.inputs
    over = op.names("over")
    outer = tuple(dim for dim in b.type(x).dims if dim not in over)
    dx = b.emit("contracts_dx", [*grads, *map(b.saved, weights)], [x], inner=over)[0] if b.wanted(x) else None
    pairs = zip(grads, weights, strict=True)
    dws = [b.emit("contract", [grad, b.saved(x)], [w], over=outer)[0] if b.wanted(w) else None for grad, w in pairs]
    return [dx, *dws]


def _copies(it: Local) -> int:
    """What is there twice: the results that stand apart."""
    found = (it.op.outputs[int(i)].type for i in it.op.names("apart"))
    return sum(it.program.elements(type) * ITEM_BYTES[type.dtype] for type in found)


def _gradients_together(it: Local) -> int:
    """The results' gradients as one, where that copy saves as much memory traffic as it costs (`fused_linear`).

    Gradients that are slices of one from the start are not copied, which is not known here.
    """
    grads, weights = len(it.types) // 2, it.types[len(it.types) // 2 :]
    inner = it.op.names("inner")
    width = prod(it.program.local_size(weights[0], dim) for dim in inner)
    rows = sum(it.program.elements(weight) for weight in weights) // width
    return sum(map(it.bytes, range(grads))) if rows <= width * (grads - 1) else 0


CONTRACTS = OpDef(
    "contracts",
    "The products x·w of one value with several weights, each summed over the dims `over`, as one; the results share"
    " memory, but for those whose places `apart` names.",
    operands=takes("x", "w"),
    more=True,
    attributes=(*CONTRACT.attributes, Attribute("apart", kinds=(tuple,), default=())),
    typing=_products,
    adjoint=_products_adjoint,
    function="fused_linear",
    saves=operands,
    scratch=_copies,
)

CONTRACTS_DX = OpDef(
    "contracts_dx",
    "The gradient of contracts' value, of dims `inner`: the sum of the products of each result's with its weight.",
    operands=takes("dy", "w"),
    more=True,
    attributes=(Attribute("inner", kinds=(tuple,)),),
    typing=_sum_of_products,
    scratch=_gradients_together,
)

# ---- a gate


def _alike(types: Sequence[Type], op: Op) -> list[Shape]:
    if len({(type.dtype, type.dims) for type in types}) != 1:
        raise TypingError(f"{op.kind} takes values of the same dims")
    return same(types, op)


def _two_alike(types: Sequence[Type], op: Op) -> list[Shape]:
    return _alike(types, op) * 2


def _gate_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    return [*b.emit(f"{op.kind}_dx", [*grads, *map(b.saved, op.inputs)], op.inputs, **dict(op.attrs))]


def _function_and_slope(it: Local) -> int:
    """A kernel has them in registers; plain torch makes both, forward and backward, with two terms on the way."""
    if it.launched:
        return 0
    terms = 4 + it.is_narrow + ("tanh" in dict(it.op.attrs).values())
    return terms * it.widened() - len(it.op.outputs) * it.bytes()


def _gated(function: OpDef) -> tuple[OpDef, OpDef]:
    """A product with a function of the other factor, and its gradients."""
    entry = OpDef(
        f"{function.name}_mul",
        f"{function.name}(x) · y, the gate of a gated linear unit (Shazeer 2020).",
        _alike,
        operands=takes("x", "y"),
        attributes=function.attributes,
        adjoint=_gate_adjoint,
        function=f"{function.name}_mul",
        saves=operands,
        scratch=_function_and_slope,
    )
    slopes = OpDef(
        f"{entry.name}_dx",
        f"The gradients of {entry.name}'s operands.",
        _two_alike,
        operands=takes("dy", "x", "y"),
        attributes=function.attributes,
        linear=((0,),),
        scratch=_function_and_slope,
    )
    return entry, slopes


GATES = {function.name: f"{function.name}_mul" for function in FUNCTIONS if function.name in ("silu", "gelu")}
"""The gates, by the functions that open them."""

NORMS = {norm.name: f"add_{norm.name}" for norm in (RMSNORM, LAYERNORM)}
"""Norms that may take in the sum before them."""

LOSSES = ("linear_cross_entropy", "linear_softmax_stats", "logit_softmax_stats")
"""Those that take in what makes their logits, or go through these once."""

FUSED = (*NORMS.values(), *GATES.values(), CONTRACTS.name, *LOSSES, "rope_pair")
"""The ops of a forward that stand for several."""

ENTRIES = (
    *(entry for norm in (RMSNORM, LAYERNORM) for entry in _added(norm)),
    *(entry for function in FUNCTIONS if function.name in GATES for entry in _gated(function)),
    CONTRACTS,
    CONTRACTS_DX,
)
