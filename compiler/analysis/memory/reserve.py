"""Memory besides the step's: what CUDA, its libraries and the driver have, and looks at values that
`watch` asks for.

Non-goals: how much each of the former takes (`gpus`).
"""

from ...config.gpus import gpu
from ...ir import ITEM_BYTES, PRECISIONS, Program
from ...ops import messages


def reserve(program: Program) -> int:
    """Bytes: the plan's own number, or an estimate for its GPU; none where it names no known
    one.
    """
    if not (found := gpu(program.cluster)):
        return 0
    given = program.cluster.reserve
    return found.reserve(communicators(program)) if given is None else given


def communicators(program: Program) -> int:
    """The groups of ranks in which a rank communicates: each has buffers of its own."""
    sent = (each for op in program.ops for each in messages(program, op, program.types))
    return len({(each.axes, each.among) for each in sent}) + bool(program.pipeline)


PIECE = 1 << 24
"""Elements of the state that `replay` updates twice at a time."""

KEYS, PRODUCTS = 8 << 20, 4 << 20
"""Bytes of the keys of hashes, which stay, and of a block's products with them."""

WINDOW = 4 * (64 + 1)
"""Bytes of the losses by which others are spikes, and of their number."""


def loss_window(program: Program) -> int:
    """Bytes of the losses that a run keeps, also in checkpoints."""
    return WINDOW if program.watch.spikes else 0


def hash_keys(program: Program) -> int:
    """Bytes that looks take of a rank at any time."""
    return KEYS if program.watch.copies or program.watch.replay else 0


def looks_in_update(program: Program) -> int:
    """Bytes that they take during the update besides."""
    own = max(
        (program.elements(bucket.type) for bucket in program.buckets if bucket.params), default=0
    )
    pieces = min(own, PIECE) * _element(program) if program.watch.replay else 0
    return PRODUCTS + pieces if hash_keys(program) else 0


def _element(program: Program) -> int:
    """Bytes of all that an update may change of an element: parameter, gradient, slots, working
    copy.
    """
    stored = next(bucket.type.dtype for bucket in program.buckets if bucket.params)
    used = PRECISIONS[program.train.precision]
    held = (2 + len(program.train.optimizer.slots)) * ITEM_BYTES[stored]
    return held + (ITEM_BYTES[used] if used != stored else 0)
