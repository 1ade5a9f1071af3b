"""Softmax statistics of one rank, rescaled from its own largest logit to the largest of all ranks."""

from collections.abc import Sequence

from ..ir import PARTIAL, REPLICATED, Kind, Op, Program, Type
from .call import Call, over_classes
from .fused_parallel_loss import moved
from .loss import SMOOTHING
from .protocol import KERNELS, Attribute, OpDef, TypingError, Vjp, is_pending, takes
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


def _saves(it: Local) -> Saved:
    return Saved(others=(("exp(m - peak)", it.bytes(0)),))


def _call(it: Local) -> Call:
    """How many of the classes each rank has."""
    classes, axes = str(it.op.get("classes")), it.types[0].axes_in(Kind.MAXIMUM)
    return over_classes(it, classes, axes, columns=it.program.size(classes) // it.program.degree(axes))


REJOINED = OpDef(
    "rescale_to_global_max",
    "The results of linear_softmax_stats or logit_softmax_stats as local_softmax_stats gives them: z · exp(m − peak),"
    " and t less the peak times what the labels have of this rank's part of `classes`.",
    operands=takes("m", "z", "t", "peak", "labels"),
    attributes=(SMOOTHING, CLASSES),
    typing=_rescaled,
    vjp=Vjp(wrt=(1, 2), unread=(1, 2)),
    function="rescale_to_global_max",
    call=_call,
    module=KERNELS,
    saves=_saves,
)
