"""The part of a GPU's memory that no tensor gets: CUDA, its libraries and the driver have it.

Non-goals: how much each takes (`gpus`).
"""

from ...config.gpus import gpu
from ...ir import Program
from ...ops import messages


def reserve(program: Program) -> int:
    """Bytes: the plan's own number, or an estimate for its GPU; none where it names no known one."""
    if not (found := gpu(program.cluster)):
        return 0
    given = program.cluster.reserve
    return found.reserve(communicators(program)) if given is None else given


def communicators(program: Program) -> int:
    """The groups of ranks in which a rank communicates: each has buffers of its own."""
    sent = (each for op in program.ops for each in messages(program, op, program.types))
    return len({(each.axes, each.among) for each in sent}) + bool(program.pipeline)
