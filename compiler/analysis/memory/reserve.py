"""What of a GPU no tensor gets: CUDA, its libraries and the driver have it.

Non-goals: how much each takes (`gpus`).
"""

from ...config.gpus import gpu
from ...ir import Program, walk
from ...ir.placements import coercion_of


def reserve(program: Program) -> int:
    """Bytes: the plan's own number, or an estimate for its GPU; none where it names no known one."""
    if not (found := gpu(program.cluster)):
        return 0
    given = program.cluster.reserve
    return found.reserve(communicators(program)) if given is None else given


def communicators(program: Program) -> int:
    """The groups of ranks in which a rank communicates: each has buffers of its own."""
    moves = [op for op in walk(program.region.body) if op.kind == "coerce" and coercion_of(op).collective]
    return len({(op.names("axes"), op.names("among")) for op in moves}) + bool(program.pipeline)
