"""Triton kernels of emitted programs' ops, each with a torch twin of the same signature, one op a file.

Only a program that was compiled with kernels imports this package; the runtime itself works without Triton.
"""

# pyright: reportUnusedImport=false

from .accumulate import Accumulate
from .adamw import AdamW
from .attention import Attention, Block, Blocks, RingAttention
from .cross_entropy import CrossEntropy, LogitSoftmaxStats, rescale_to_global_max
from .experts import (
    Balance,
    Combine,
    Dispatch,
    Exchange,
    ExchangeBack,
    ExchangeCounts,
    GroupedLinear,
    Product,
    Products,
    RouterZ,
    SortByExpert,
    TopK,
)
from .gates import GeluMul, SiluMul
from .launching import Tile
from .linear_cross_entropy import LinearCrossEntropy
from .linear_softmax_stats import LinearSoftmaxStats
from .norms import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from .rope import Rope, RopePair
from .tiles_file import read_tiles
