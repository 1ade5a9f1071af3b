"""Ops that several ranks do alike, although their kernels on GPUs do not give the same bits each
time.

A value that is I on an axis is made by each of its ranks for itself and taken to be the same on
all.  Where it is not, to the last bit, gradients differ, and from the first update on the copies of
weights.  Values that are R on an axis may differ: their gradients are summed over it, so that all
ranks get one sum.
"""

from collections.abc import Iterator

from ..ir import INVARIANT, Axis, Op, Program
from ..ops import OPS
from ..ops.protocol import DETERMINISTIC, always
from ..ops.saved_tensors import Local


def drifting(program: Program) -> Iterator[tuple[Op, list[Axis]]]:
    """Each op of the forward that is done alike and is not deterministic, and the axes that its
    copies drift along.

    Stages work on microbatches of their own.
    """
    stages = program.pipeline.axis if program.pipeline else ""
    axes = [axis for axis in program.axes if axis.size > 1 and axis.name != stages]
    if not axes:
        return
    for op in program.ops:
        is_deterministic = OPS[op.kind].deterministic
        if is_deterministic is always or dict(op.attrs).get(DETERMINISTIC.name) == "on":
            continue
        alike = [axis for axis in axes if op.outputs[0].type.placement_on(axis.name) == INVARIANT]
        if alike and not is_deterministic(Local(program, op, tuple(program.operands(op)))):
            yield op, alike
