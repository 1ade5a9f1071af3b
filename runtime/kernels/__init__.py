"""Triton kernels of emitted programs' ops, each with a torch twin of the same signature, one op a file.

Only a program that was compiled with kernels imports this package; the runtime itself works without Triton.
"""

from .gates import GeluMul, SiluMul
from .launching import Tile
from .layer_norm import AddLayerNorm, LayerNorm
from .rms_norm import AddRMSNorm, RMSNorm
from .rope import Rope, RopePair

__all__ = ["AddLayerNorm", "AddRMSNorm", "GeluMul", "LayerNorm", "RMSNorm", "Rope", "RopePair", "SiluMul", "Tile"]
