"""Softmax statistics of one rank, rescaled from its own largest logit to the largest of all ranks."""

from collections.abc import Sequence

from ..ir import PARTIAL, REPLICATED, Kind, Op, Program, Type, sharded
from .fused_parallel_loss import SHARES, moved
from .loss import SMOOTHING
from .protocol import KERNELS, Attribute, Builder, OpDef, TypingError, is_pending, takes
from .saved_tensors import Local, Saved

CLASSES = Attribute("classes", kinds=(str,))


def _rescaled(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    m, z, t, peak, labels = types
    axes = m.axes_in(Kind.MAXIMUM)
    summed, largest = (Type(m.dtype, m.dims, moved(program, m, axes, to)) for to in (PARTIAL, REPLICATED))
    shared = z.dims[:-1] == m.dims and z.axes_of(z.dims[-1]) == axes
    if not axes or is_pending(m) or not shared or (t, peak) != (summed, largest) or labels.dims != m.dims:
        raise TypingError(f"{op.kind} takes a share of each rank, and the largest of all")
    return [Type(m.dtype, m.dims, moved(program, m, axes, PARTIAL))] * 2


def _rescaled_dz(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    _, m, _ = types
    shares = str(op.get("as"))
    return [Type(m.dtype, (*m.dims, shares), moved(program, m, m.axes_in(Kind.MAXIMUM), sharded(shares)))]


def _adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """z's gradient is that of its sum over ranks times exp(m − peak), t's is that of its sum."""
    (dz, dt), (m, z, _, peak, _) = grads, op.inputs
    shares = b.type(z).dims[-1]
    return [
        None,
        b.emit("rescale_to_global_max_dz", [dz, b.saved(m), b.saved(peak)], [z], **{"as": shares})[0],
        dt,
        None,
        None,
    ]


def _saves(it: Local) -> Saved:
    return Saved(others=(("exp(m - peak)", it.bytes(0)),))


REJOINED = OpDef(
    "rescale_to_global_max",
    "The results of linear_softmax_stats or logit_softmax_stats as local_softmax_stats gives them: z · exp(m − peak),"
    " and t less the peak times what the labels have of this rank's part of `classes`.",
    operands=takes("m", "z", "t", "peak", "labels"),
    attributes=(SMOOTHING, CLASSES),
    typing=_rescaled,
    adjoint=_adjoint,
    function="rescale_to_global_max",
    module=KERNELS,
    saves=_saves,
)
REJOINED_DZ = OpDef(
    "rescale_to_global_max_dz",
    "The gradient of z from that of rescale_to_global_max's: dz · exp(m − peak), in the dim `as`.",
    operands=takes("dz", "m", "peak"),
    attributes=(SHARES,),
    typing=_rescaled_dz,
)
