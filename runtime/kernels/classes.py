"""The classes of a rank's logits, and the weight of a label among them.

Non-goals: no logits; the formulas stand in `logits`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.mesh import Axis


@dataclass(frozen=True)
class Classes:
    """A stretch of a vocabulary, as the last dim of some logits has it.

    first      the class of column 0
    size       how many columns are classes; those behind are padding
    smoothing  the share of each label that goes to all classes alike (arXiv:1512.00567)
    each       what of it goes to each class
    cap        logits are bounded by ±cap, cap · tanh(logit / cap), if it is not 0 (Gemma 2, arXiv:2408.00118)
    """

    first: int
    size: int
    smoothing: float = 0.0
    each: float = 0.0
    cap: float = 0.0

    def part(self, columns: slice) -> "Classes":
        """Those of some columns."""
        size = min(self.size, columns.stop) - columns.start
        return replace(self, first=self.first + columns.start, size=max(size, 0))

    def column(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's column, 0 for a label elsewhere, and whether it is here."""
        local = labels - self.first
        here = (local >= 0) & (local < self.size)
        return local.masked_fill_(~here, 0), here

    def weight(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """What of each label goes to these classes: 1 − smoothing if it is here, and `each` for every class."""
        _, here = self.column(labels)
        return (1 - self.smoothing) * here.to(dtype) + self.each * self.size


def classes_of(
    columns: int,
    axis: Axis | None = None,
    classes: int | None = None,
    smoothing: float = 0.0,
    cap: float = 0.0,
) -> Classes:
    """Those of this rank's `columns` of the vocabulary, of which the first `classes` of all ranks are no padding."""
    first, every = (axis.rank * columns, axis.size * columns) if axis else (0, columns)
    count = every if classes is None else classes
    return Classes(first, max(0, min(columns, count - first)), smoothing, smoothing / count, cap)
