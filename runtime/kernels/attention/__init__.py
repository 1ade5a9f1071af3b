"""Flash attention: forward, backward, the merge of partial results, and a ring of ranks."""

from .op import Attention, backend
from .ring import RingAttention
from .tiles import Block, Blocks

__all__ = ["Attention", "Block", "Blocks", "RingAttention", "backend"]
