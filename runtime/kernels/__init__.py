"""Triton kernels of emitted programs' ops, each with a torch twin of the same signature, one op a file.

Only a program that was compiled with kernels imports this package; the runtime itself works without Triton.
"""

from .cross_entropy import CrossEntropy, LogitParts, rejoined
from .launching import Tile
from .linear_cross_entropy import LinearCrossEntropy
from .linear_parts import LinearParts

__all__ = ["CrossEntropy", "LinearCrossEntropy", "LinearParts", "LogitParts", "Tile", "rejoined"]
