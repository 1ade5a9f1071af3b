"""Memory of the looks at values that a plan's `watch` asks for."""

from ...ir import ITEM_BYTES, PRECISIONS, Program

PIECE = 1 << 24
"""Elements of the state that `replay` updates twice at a time."""

KEYS, PRODUCTS = 8 << 20, 4 << 20
"""Bytes of the keys of hashes, which stay, and of a block's products with them."""


WINDOW = 4 * (64 + 1)
"""Bytes of the losses by which others are spikes, and of their number."""


def window(program: Program) -> int:
    """Bytes of the losses that a run keeps, also in checkpoints."""
    return WINDOW if program.watch.spikes else 0


def keys(program: Program) -> int:
    """Bytes that looks take of a rank at any time."""
    return KEYS if program.watch.copies or program.watch.replay else 0


def kept(program: Program) -> int:
    """Bytes that they take during the update besides."""
    own = max((program.elements(bucket.type) for bucket in program.buckets if bucket.params), default=0)
    pieces = min(own, PIECE) * _element(program) if program.watch.replay else 0
    return PRODUCTS + pieces if keys(program) else 0


def _element(program: Program) -> int:
    """Bytes of all that an update may change of an element: parameter, gradient, slots, working copy."""
    stored = next(bucket.type.dtype for bucket in program.buckets if bucket.params)
    used = PRECISIONS[program.train.precision]
    held = (2 + len(program.train.optimizer.slots)) * ITEM_BYTES[stored]
    return held + (ITEM_BYTES[used] if used != stored else 0)
