"""Memory besides the step's: what CUDA, its libraries and the driver have, and looks at values that
`watch` asks for.

Non-goals: how much CUDA, its libraries and the driver take each (`gpus`).
"""

from ...config.gpus import gpu
from ...ir import ITEM_BYTES, PRECISIONS, Program
from ...ops import messages


def reserve(program: Program) -> int:
    """Bytes: the plan's own number, or an estimate for its GPU; none where it names no known
    one.
    """
    known_gpu = gpu(program.cluster)
    if not known_gpu:
        return 0
    if program.cluster.reserve is not None:
        return program.cluster.reserve
    return known_gpu.reserve(communicators(program))


def communicators(program: Program) -> int:
    """The number of groups of ranks that a rank communicates in: each has buffers of its own."""
    groups = set[tuple[tuple[str, ...], tuple[int, ...]]]()
    for op in program.ops:
        for message in messages(program, op, program.types):
            groups.add((message.axes, message.among))
    return len(groups) + bool(program.pipeline)


PIECE = 1 << 24
"""Elements of the state that `replay` updates twice at a time."""

KEYS, PRODUCTS = 8 << 20, 4 << 20
"""Bytes of the keys of hashes, which stay, and of a block's products with them."""

WINDOW = 4 * (64 + 1)
"""Bytes of the losses that decide whether another is a spike, and of their number."""


def loss_window(program: Program) -> int:
    """Bytes of the losses that a run keeps, also in checkpoints."""
    return WINDOW if program.watch.spikes else 0


def hash_keys(program: Program) -> int:
    """Bytes that looks at values take on a rank at any time."""
    return KEYS if program.watch.copies or program.watch.replay else 0


def looks_in_update(program: Program) -> int:
    """Bytes that looks take during the update besides."""
    if not hash_keys(program):
        return 0
    if not program.watch.replay:
        return PRODUCTS
    sizes = [program.elements(bucket.type) for bucket in program.buckets if bucket.params]
    return PRODUCTS + min(max(sizes, default=0), PIECE) * _element(program)


def _element(program: Program) -> int:
    """Bytes of all that an update may change of an element: parameter, gradient, slots, working
    copy.
    """
    stored = next(bucket.type.dtype for bucket in program.buckets if bucket.params)
    used = PRECISIONS[program.train.precision]
    size = (2 + len(program.train.optimizer.slots)) * ITEM_BYTES[stored]
    if used != stored:
        size += ITEM_BYTES[used]
    return size
