"""Fused ops: each does the work of several in one pass over memory, or in one product.

A fused op means the composition of its parts.  Only its operands are saved; backward recomputes the
intermediates.  Non-goals: where they are used (`passes.fuse_ops`); the head with its loss
(`fused_loss`, `fused_parallel_loss`).
"""

from collections.abc import Sequence
from functools import partial
from math import prod

from attrs import evolve

from ..ir import ITEM_BYTES, Op, Program, Type
from .algebra import ADD, CONTRACT
from .norm import EPS, LAYERNORM, RMSNORM, norm_workspace
from .pointwise import FUNCTIONS, same
from .protocol import Attribute, Builder, OpDef, Shape, TypingError, Vjp, takes
from .saved_tensors import Local, Saved, operands
from .vjp import vjp
from .work import Product, Work

# ---- a sum and its norm


def _sum_and_norm(types: Sequence[Type], op: Op) -> list[Shape]:
    x, y, weight, *_ = types
    if (x.dtype, x.dims) != (y.dtype, y.dims) or x.dims[-len(weight.dims) :] != weight.dims:
        raise TypingError(
            f"{op.kind} takes two values of the same dims, which end in those of its weight"
        )
    return [(x.dtype, x.dims)] * 2


def _adjoint(op: Op, grads: Sequence[str], norm: OpDef, b: Builder) -> list[str | None]:
    """Both terms have the gradient of their sum: its own gradient, and what comes through its
    norm.
    """
    (d_sum, d_norm), (x, _, *weights), total = grads, op.inputs, op.outputs[0].name
    normed = evolve(op, kind=norm.name, inputs=(total, *weights))
    through, *_ = vjp(norm, normed, [d_norm], [0], b)
    (dx,) = b.emit(ADD.name, [d_sum, through], [x])
    return [dx, dx, *vjp(norm, normed, [d_norm], range(1, 1 + len(weights)), b)]


def _norm_saves(local: Local) -> Saved:
    """The sum, the weights, and a number or two for each row."""
    rows = local.elements(0) // local.elements(2) * local.wide
    mean = (("mean", rows),) if local.op.kind == "add_layernorm" else ()
    return Saved(operands=(2,), results=(0,), others=(*mean, ("1 / deviation", rows)))


def _norm_of_sum_op(norm: OpDef) -> OpDef:
    """A norm of a sum that is used itself too."""
    return OpDef(
        f"add_{norm.name}",
        f"The sum of two values, and its {norm.name}.",
        _sum_and_norm,
        operands=(*takes("x", "y"), *norm.operands[1:]),
        attributes=(EPS,),
        unsharded_dims=lambda types, op: frozenset(types[2].dims),  # the weight's
        adjoint=lambda op, grads, b: _adjoint(op, grads, norm, b),
        function=f"add_{norm.function}",
        saves=_norm_saves,
        workspace=norm_workspace,
    )


# ---- several products of one value


def _products(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    x, *weights = types
    single = Op(CONTRACT.name, (), (), (("over", op.names("over")),), span=op.span)
    return [CONTRACT.infer(program, (x, weight), single)[0] for weight in weights]


def _products_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """The adjoint; gradients of weights are products of their own."""
    x, *weights = op.inputs
    outer = tuple(dim for dim in b.type(x).dims if dim not in op.names("over"))
    dx = vjp(CONTRACTS, op, grads, [0], b)[0] if b.is_wanted(x) else None
    weight_grads: list[str | None] = []
    for grad, weight in zip(grads, weights, strict=True):
        dw = None
        if b.is_wanted(weight):
            (dw,) = b.emit("contract", [grad, b.save(x)], [weight], over=outer)
        weight_grads.append(dw)
    return [dx, *weight_grads]


def _products_work(local: Local, backward: bool = False) -> Work:
    """One product with all weights side by side; backward, of their gradients."""
    x, *weights = local.types
    inner = prod(local.program.local_size(x, dim) for dim in local.op.names("over"))
    outer = sum(map(local.program.elements, weights)) // inner
    n, k = (inner, outer) if backward else (outer, inner)
    return Work(x.dtype, (Product(local.elements() // inner, n, k),))


def _copies(local: Local) -> int:
    """The bytes of results that are copied to memory of their own."""
    copied_bytes = 0
    for place in local.op.names("apart"):
        type = local.op.outputs[int(place)].type
        copied_bytes += local.program.elements(type) * ITEM_BYTES[type.dtype]
    return copied_bytes


def _gradients_together(local: Local) -> int:
    """The results' gradients as one, where that copy saves as much memory traffic as it costs
    (`fused_linear`).

    Gradients that are slices of one from the start are not copied, which is not known here.
    """
    weights, over = range(1, len(local.types)), local.op.names("over")
    width = prod(local.program.local_size(local.types[0], dim) for dim in over)
    rows = sum(map(local.elements, weights)) // width
    if rows > width * (len(weights) - 1):
        return 0
    return local.bytes() // width * rows


CONTRACTS = OpDef(
    "contracts",
    "The products x·w of one value with several weights, each summed over the dims `over`, as"
    " one; the results share"
    " memory, but for those whose places `apart` names.",
    operands=takes("x", "w"),
    variadic=True,
    attributes=(*CONTRACT.attributes, Attribute("apart", kinds=(tuple,), default=())),
    typing=_products,
    vjp=Vjp(
        unread=(0,), workspace=_gradients_together, work=partial(_products_work, backward=True)
    ),
    adjoint=_products_adjoint,
    function="fused_linear",
    saves=operands,
    workspace=_copies,
    work=_products_work,
)

# ---- a gate


def _alike(types: Sequence[Type], op: Op) -> list[Shape]:
    if len({(type.dtype, type.dims) for type in types}) != 1:
        raise TypingError(f"{op.kind} takes values of the same dims")
    return same(types, op)


def _function_and_slope(local: Local, results: int = 1) -> int:
    """The bytes of a function and its slope.

    A kernel has them in registers; plain torch makes both, forward and backward, with two terms on
    the way.
    """
    if local.runs_kernel:
        return 0
    terms = 4 + local.is_narrow + ("tanh" in dict(local.op.attrs).values())
    return terms * local.wide_bytes() - results * local.bytes()


def _gate_op(function: OpDef) -> OpDef:
    """A product with a function of the other factor."""
    return OpDef(
        f"{function.name}_mul",
        f"{function.name}(x) · y, the gate of a gated linear unit (Shazeer 2020).",
        _alike,
        operands=takes("x", "y"),
        attributes=function.attributes,
        vjp=Vjp(workspace=partial(_function_and_slope, results=2)),
        function=f"{function.name}_mul",
        workspace=_function_and_slope,
    )


GATES = {name: f"{name}_mul" for name in ("gelu", "silu")}
"""The gates, by the functions that open them."""

NORMS = {norm.name: f"add_{norm.name}" for norm in (RMSNORM, LAYERNORM)}
"""Norms that may take in the sum before them."""

LOSSES = ("linear_cross_entropy", "linear_softmax_stats", "logit_softmax_stats")
"""The losses that compute their logits, or read them once."""

FUSED = (*NORMS.values(), *GATES.values(), CONTRACTS.name, *LOSSES, "rope_pair")
"""The fused ops of a forward."""

ENTRIES = (
    *map(_norm_of_sum_op, (RMSNORM, LAYERNORM)),
    *(_gate_op(function) for function in FUNCTIONS if function.name in GATES),
    CONTRACTS,
)
