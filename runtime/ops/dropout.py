"""Stateless dropout: the mask is a hash of the sample's seed and the element's global index in the
sample.

A draw is a key made of the seed and the sample's number in the run.  So the same elements are
dropped on every mesh, in every placement, in backward, when a call is recomputed, and after a
restart.

Non-goals: speed.  A dozen elementwise kernels on 8 bytes an element make the bits, which no kernel
of ours fuses yet.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..comm.mesh import Axis
from ..comm.positions import Positions
from .counter_rng import happens, key_of, words

Split = Mapping[int, Axis | Positions]
_WHOLE: Split = {}


def draws_of(samples: Sequence[int], seed: int) -> Tensor:
    """One draw for each sample, by its number in the run: int64."""
    return words(key_of(f"{seed}/dropout"), torch.tensor(samples))


def fork(draws: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """Draws for each of `count` repetitions, [batch] each; none where nothing is dropped."""
    if draws is None:
        return [None] * count
    # sites are positive
    return words(draws, -torch.arange(1, count + 1, device=draws.device).unsqueeze(1)).unbind()


def dropout(
    x: Tensor, draws: Tensor | None, p: float, site: int, batch: int, split: Split = _WHOLE
) -> Tensor:
    """x / (1 − p) with elements zeroed, each with probability p (arXiv:1207.0580); x itself without
    draws.

    draws: [b], int64.  `site` counts the model's dropouts, from 1; `batch` is the dim of samples.
    `split` maps each sharded dim, other than batch, to its axis or to the positions that x has.
    Elements are numbered row-major, in the order of the dims.
    """
    if draws is None:
        return x
    return cast(Any, _Dropout).apply(x, draws, p, site, batch, split)


class _Dropout(Function):
    """Linear and diagonal, so its own backward; nothing of x's size is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, draws: Tensor, p: float, site: int, batch: int, split: Split
    ) -> Tensor:
        ctx.save_for_backward(draws)
        ctx.how = (p, site, batch, split)
        return _apply_dropout(x, draws, p, site, batch, split)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (draws,) = cast(tuple[Tensor, ...], ctx.saved_tensors)
        return _apply_dropout(grad_outputs[0], draws, *ctx.how), None, None, None, None, None


def _apply_dropout(
    x: Tensor, draws: Tensor, p: float, site: int, batch: int, split: Split
) -> Tensor:
    key = _along(words(draws, torch.full_like(draws, site)), batch, x.ndim)
    return (x * (1 / (1 - p))).masked_fill(happens(p, key, _index(x, batch, split)), 0)


def _index(x: Tensor, batch: int, split: Split) -> Tensor:
    """The global index in its sample of each element, int64; it has size 1 along `batch`."""
    index, stride = torch.zeros((), dtype=torch.int64, device=x.device), 1
    dims = [dim for dim in range(x.ndim) if dim != batch]
    for dim in reversed(dims):
        size, part = x.shape[dim], split.get(dim)
        if isinstance(part, Positions):
            places, size = part.indices(x.device), part.size
        elif part is not None:
            first = part.rank * size
            places, size = torch.arange(first, first + size, device=x.device), size * part.size
        else:
            places = torch.arange(0, size, device=x.device)
        index = index + _along(places * stride, dim, x.ndim)
        stride *= size
    return index


def _along(x: Tensor, dim: int, ndim: int) -> Tensor:
    """A vector as a tensor of `ndim` dims, of size 1 but along `dim`."""
    return x.view([-1 if i == dim else 1 for i in range(ndim)])
