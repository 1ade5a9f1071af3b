"""The biases that routers add to scores to choose: buffers of a model, moved after each step so
that loads become even.

They have no gradient, are float32, and equal on all ranks that have them (Wang et al. 2024,
arXiv:2408.15664).
"""

import re
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from .parameters import Spec, zeros


class Biases:
    """Biases of a model's own layers, by their names in its state."""

    def __init__(self, model: nn.Module) -> None:
        params = dict(model.named_parameters(remove_duplicate=False))
        state_items = model.state_dict(keep_vars=True).items()
        buffers = dict[str, Tensor]()
        for name, tensor in state_items:
            if name not in params:
                buffers[name] = tensor
        self.by_name: Mapping[str, Tensor] = buffers

    def balance(self, pattern: str, load: Tensor, rate: float, skip: Tensor) -> None:
        """Adds rate · sign(mean − load), row by row of `load`, to the biases that match `pattern`;
        nothing where `skip` is true.

        load [layers, experts], int64.  The texts that the pattern's `*` match are the indices of a
        bias' row.
        """
        # in whole numbers, which are exact
        below = (load.sum(-1, keepdim=True) - load * load.shape[-1]).sign()
        moved = (below * rate).masked_fill(skip, 0)
        for layer, bias in self._matching(pattern):
            bias += moved[layer]

    def _matching(self, pattern: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        expression = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
        for name, bias in self.by_name.items():
            if match := expression.fullmatch(name):
                yield tuple(map(int, match.groups())), bias

    def zero(self) -> None:
        """Sets all biases to their initial value, zero."""
        for bias in self.by_name.values():
            bias.zero_()

    def take(self, value: Callable[[str, Spec], Tensor]) -> None:
        """Sets the values of all biases, by name and spec."""
        for name, bias in self.by_name.items():
            bias.copy_(value(name, Spec(tuple(bias.shape), {}, zeros())))
