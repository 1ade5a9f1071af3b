"""Whether the logits of losses are saved for backward, or computed in chunks and never all in
memory.

Chunks cost no time where each rank has the whole vocabulary: their gradient is made with them.
Where a rank has a part of it they cost a fourth product of the head's size, since their gradient
needs what other ranks have (`runtime.kernels`, whose `linear_cross_entropy` counts both).  So a
part is made in chunks only where it is large.
"""

from math import prod

from ..config.settings import AUTO, CHUNK, SAVE, TRITON
from ..ir import ITEM_BYTES, Program, Type
from ..ops.loss import CROSS_ENTROPY
from ..syntax.diagnostics import wrong

LARGE = 1 << 30
"""Bytes of a microbatch's logits on a rank; from this size on they are computed in chunks."""


def logits_for(program: Program) -> str:
    """The plan's choice, or the one for its losses.

    Raises PlanError where it asks for chunks without kernels.
    """
    train = program.train
    if train.kernels != TRITON:
        if train.logits == CHUNK:
            help = "write `kernels = triton`, or leave `logits` out"
            span = train.spans["logits"]
            raise wrong("E0414", "torch's own ops compute all logits at once", span, help=help)
        return train.logits
    if train.logits != AUTO:
        return train.logits
    losses = [op for op in program.ops if op.kind == CROSS_ENTROPY.name]
    if not losses or any(_in_chunks(program, program.types[op.inputs[0]]) for op in losses):
        return CHUNK
    return SAVE


def _in_chunks(program: Program, type: Type) -> bool:
    """Whether a rank has all classes, or its part of the logits is large."""
    over = _axes(program, type)
    if type.dims[-1] not in over.values():
        return True
    elements = prod(map(program.size, type.dims)) // program.degree(tuple(over))
    return elements * ITEM_BYTES[type.dtype] >= LARGE


def _axes(program: Program, type: Type) -> dict[str, str]:
    """Which of a type's dims each axis will divide: the first that claims it."""
    claims = sorted(program.claims, key=lambda claim: claim.rank, reverse=True)
    return {claim.axis: claim.dim for claim in claims if claim.split and claim.dim in type.dims}
