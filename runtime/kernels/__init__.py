"""Triton kernels of emitted programs' ops, each with a torch twin of the same signature, one op a file.

Only a program that was compiled with kernels imports this package; the runtime itself works without Triton.
"""

from .accumulate import Accumulate
from .adamw import AdamW
from .launching import Tile

__all__ = ["Accumulate", "AdamW", "Tile"]
