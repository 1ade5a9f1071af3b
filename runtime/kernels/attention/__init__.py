"""Flash attention: forward, backward, and the merge of partial results."""

from .backend import Choice, backend
from .merge import Merge
from .op import Attention
from .tiles import Block, Blocks

__all__ = ["Attention", "Block", "Blocks", "Choice", "Merge", "backend"]
