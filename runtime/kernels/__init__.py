"""Triton kernels of emitted programs' ops, each with a torch twin of the same signature, one op a
file.

Only a program that was compiled with kernels imports this package; the runtime itself works without
Triton.
"""

from .accumulate import Accumulate
from .adamw import AdamW
from .attention.op import Attention, RingAttention
from .attention.tiles import Block, Blocks
from .cross_entropy import CrossEntropy, LogitSoftmaxStats, rescale_to_global_max
from .experts.exchange import Exchange, ExchangeBack, ExchangeCounts
from .experts.grouped_linear import GroupedLinear, Product, Products
from .experts.losses import Balance, RouterZ
from .experts.rows import Combine, Dispatch
from .experts.sort import SortByExpert
from .experts.top_k import TopK
from .gates import GeluMul, SiluMul
from .launching import Tile
from .linear_cross_entropy import LinearCrossEntropy, LinearSoftmaxStats
from .norms import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from .rope import Rope, RopePair
from .tiles_file import read_tiles

__all__ = [
    "Accumulate",
    "AdamW",
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "Balance",
    "Block",
    "Blocks",
    "Combine",
    "CrossEntropy",
    "Dispatch",
    "Exchange",
    "ExchangeBack",
    "ExchangeCounts",
    "GeluMul",
    "GroupedLinear",
    "LayerNorm",
    "LinearCrossEntropy",
    "LinearSoftmaxStats",
    "LogitSoftmaxStats",
    "Product",
    "Products",
    "RMSNorm",
    "RingAttention",
    "Rope",
    "RopePair",
    "RouterZ",
    "SiluMul",
    "SortByExpert",
    "Tile",
    "TopK",
    "read_tiles",
    "rescale_to_global_max",
]
