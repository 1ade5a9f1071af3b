"""Layer norm (Ba, Kiros and Hinton, arXiv:1607.06450), by itself and of a sum."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .launching import Tile, tile_for
from .norms import normed, normed_sum


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the weight's dims, the last of x; tiles by its elements.

    Saves x, weight and two numbers in float32 for each row.
    """

    tiles: Mapping[int, Tile]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
        """As `scalec.runtime.layer_norm`; x [..., *weight.shape]."""
        return normed(x, weight, bias, eps, True, tile_for(self, self.tiles, weight.numel(), x, weight, bias))


@dataclass(frozen=True, eq=False)
class AddLayerNorm:
    """s = x + y and a = layer_norm(s), of s as it is rounded; one pass over memory, and one for their gradients.

    Saves s, weight and two numbers in float32 for each row.
    """

    tiles: Mapping[int, Tile]

    def __call__(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(s, a); x and y [..., *weight.shape]."""
        tile = tile_for(self, self.tiles, weight.numel(), x, y, weight, bias)
        return normed_sum(x, y, weight, bias, eps, True, tile)
