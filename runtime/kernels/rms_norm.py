"""Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467), by itself and of a sum."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .launching import Tile, tile_for
from .norms import normed, normed_sum


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the weight's dims, the last of x; tiles by the number of its elements.

    Saves x, weight and one number in float32 for each row.
    """

    tiles: Mapping[int, Tile]

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `scalec.runtime.rms_norm`; x [..., *weight.shape]."""
        return normed(x, weight, None, eps, False, tile_for(self, self.tiles, weight.numel(), x, weight))


@dataclass(frozen=True, eq=False)
class AddRMSNorm:
    """s = x + y and a = rms_norm(s), of s as it is rounded; one pass over memory, and one for their gradients.

    Saves s, weight and one number in float32 for each row.
    """

    tiles: Mapping[int, Tile]

    def __call__(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(s, a); x and y [..., *weight.shape]."""
        return normed_sum(x, y, weight, None, eps, False, tile_for(self, self.tiles, weight.numel(), x, y, weight))
