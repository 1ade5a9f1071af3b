"""Flash attention: forward, backward, and the merge of partial results."""

from .merge import Merge
from .op import Attention, Choice, backend
from .tiles import Block, Blocks

__all__ = ["Attention", "Block", "Blocks", "Choice", "Merge", "backend"]
