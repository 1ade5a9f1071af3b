"""Softmax statistics of logits in one pass, and their gradient in another.

For each row of logits [rows, columns], with l = cap · tanh(logit / cap) where there is a cap:
    m = max l,   z = Σ exp(l − m),   t = (1 − smoothing) · l[label] + each · Σ l,
where sums are over the columns that are classes (`Classes`), and l[label] is 0 for a label
elsewhere.  m and z are made together, from block to block (arXiv:1805.02867).  With m taken as
constant,
    dl = dz · exp(l − m) + dt · ((1 − smoothing) · [column = label] + each),   dlogit = dl · (1
        − (l / cap)²).
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ..comm.mesh import Axis
from ..ops.plain_attention import wide
from . import launching, logit_kernels
from .launching import Tile, blocks


@dataclass(frozen=True)
class Classes:
    """A stretch of a vocabulary, as the last dim of some logits has it.

    first      the class of column 0
    size       how many columns are classes; the columns after them are padding
    smoothing  the share of each label that goes to all classes alike (arXiv:1512.00567)
    each       the part of that share that one class gets
    cap        logits are bounded by ±cap, cap · tanh(logit / cap), if it is not 0 (Gemma 2,
               arXiv:2408.00118)
    """

    first: int
    size: int
    smoothing: float = 0.0
    class_share: float = 0.0
    cap: float = 0.0

    def part(self, columns: slice) -> "Classes":
        """The classes of some columns."""
        size = min(self.size, columns.stop) - columns.start
        return replace(self, first=self.first + columns.start, size=max(size, 0))

    def column(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's column, 0 for a label elsewhere, and whether it is here."""
        local = labels - self.first
        here = (local >= 0) & (local < self.size)
        return local.masked_fill_(~here, 0), here

    def weight(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of each label in these classes: 1 − smoothing if it is here, and `each`
        for every class.
        """
        _, here = self.column(labels)
        return (1 - self.smoothing) * here.to(dtype) + self.class_share * self.size


def classes_of(
    columns: int,
    axis: Axis | None = None,
    classes: int | None = None,
    smoothing: float = 0.0,
    cap: float = 0.0,
) -> Classes:
    """Classes of this rank's `columns` of the vocabulary.  The first `classes` columns of all ranks
    together are classes, by default all; the rest is padding.
    """
    first, all_columns = 0, columns
    if axis is not None:
        first, all_columns = axis.rank * columns, axis.size * columns
    count = all_columns if classes is None else classes
    return Classes(first, max(0, min(columns, count - first)), smoothing, smoothing / count, cap)


_kernels = cast(Any, logit_kernels)

Parts = tuple[Tensor, Tensor, Tensor]
"""m, z and t of each row: [rows], float32, of float64 logits float64."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """The logits x · weightᵀ + bias, in the memory of `out`.  x [rows, h], weight [columns, h],
    bias [columns].
    """
    if bias is None:
        return torch.mm(x, weight.mT, out=out)
    return torch.addmm(bias, x, weight.mT, out=out)


def new_parts(logits: Tensor) -> Parts:
    """Room for the parts of each row; `add_parts` with `begins` fills it."""
    m, z, t = (logits.new_empty(logits.shape[0], dtype=wide(logits.dtype)) for _ in range(3))
    return m, z, t


def add_parts(
    logits: Tensor,
    labels: Tensor,
    parts: Parts,
    classes: Classes,
    tile: Tile | None,
    begins: bool = True,
) -> None:
    """Brings logits [rows, columns] into the parts of their rows, the first of them or `begins`.

    labels: [rows], of the whole vocabulary; < 0 for none.  The logits of a row lie together.
    """
    if tile is None:
        _add_parts(logits, labels, parts, classes, begins)
        return
    launching.launch(
        _kernels.logit_softmax_stats,
        (logits.shape[0],),
        *(logits, labels, *parts, logits.stride(0)),
        *(classes.first, classes.size, logits.shape[1], classes.smoothing, classes.class_share),
        warps=tile.warps,
        CAP=classes.cap,
        SMOOTHED=classes.smoothing != 0,
        BEGINS=begins,
        LANES=tile.columns * logits.element_size() // 16,
        WIDTH=16 // logits.element_size(),
    )


def put_gradient(
    out: Tensor,
    logits: Tensor,
    labels: Tensor,
    m: Tensor,
    gradients: tuple[Tensor, Tensor],
    classes: Classes,
    tile: Tile | None,
) -> None:
    """Fills `out`, [rows, columns] without gaps, with the logits' gradient from the gradients of z
    and t; 0 for padding.

    m is the maximum of `add_parts`, or any other value that z was made with.  `out` may be the
    logits themselves.
    """
    if tile is None:
        _put_gradient(out, logits, labels, m, gradients, classes)
        return
    rows, columns = logits.shape
    launching.launch(
        _kernels.logit_gradient,
        (rows * blocks(columns, tile.columns),),
        *(logits, out, labels, m, *gradients, logits.stride(0)),
        *(classes.first, classes.size, columns, classes.smoothing, classes.class_share),
        warps=tile.warps,
        CAP=classes.cap,
        COLUMNS=tile.columns,
    )


def _add_parts(
    logits: Tensor, labels: Tensor, parts: Parts, classes: Classes, begins: bool
) -> None:
    m, z, t = parts
    if begins:
        m.fill_(torch.finfo(torch.float32).min)
        z.zero_()
        t.zero_()
    if classes.size == 0:
        return
    x = _class_logits(logits, m.dtype, classes)
    column, here = classes.column(labels)
    label = x.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill_(~here, 0)
    t.add_(label, alpha=1 - classes.smoothing)
    if classes.class_share:
        t.add_(x.sum(-1), alpha=classes.class_share)
    peak = torch.maximum(m, x.amax(-1))
    z.mul_((m - peak).exp_()).add_((x - peak.unsqueeze(-1)).exp_().sum(-1))
    m.copy_(peak)


def _put_gradient(
    out: Tensor,
    logits: Tensor,
    labels: Tensor,
    m: Tensor,
    gradients: tuple[Tensor, Tensor],
    classes: Classes,
) -> None:
    g_z, g_t = (gradient.unsqueeze(-1) for gradient in gradients)
    if classes.size == 0:
        out.zero_()
        return
    x = _class_logits(logits, m.dtype, classes)
    column, here = classes.column(labels)
    gradient = (x - m.unsqueeze(-1)).exp_().mul_(g_z)
    if classes.class_share:
        gradient.add_(g_t, alpha=classes.class_share)
    hot = (1 - classes.smoothing) * g_t.masked_fill(~here.unsqueeze(-1), 0)
    gradient.scatter_add_(-1, column.unsqueeze(-1), hot)
    if classes.cap:
        gradient.mul_(1 - (x / classes.cap).square())
    out[:, : classes.size] = gradient
    out[:, classes.size :] = 0


def _class_logits(logits: Tensor, dtype: torch.dtype, classes: Classes) -> Tensor:
    """The logits of the columns that are classes, capped if there is a cap."""
    x = logits[:, : classes.size].to(dtype)
    if not classes.cap:
        return x
    return classes.cap * torch.tanh(x / classes.cap)
