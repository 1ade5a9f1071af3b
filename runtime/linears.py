"""Several products of one value as one, of weights that lie one behind the other in memory."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from .deferred import now_or_later


def linears(
    x: Tensor, *weights: Tensor, into: Sequence[Sequence[int]] | None = None, apart: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """x · wᵀ for each of `weights` [n, k]: of x [..., k] results [..., n], or the last dim unflattened `into` dims.

    Where the weights are neighbours in memory, as in a flat bucket, it is one product, of which the results are slices
    that keep all of it alive; those in `apart` are copies.  Elsewhere they are products of their own.  Backward adds up
    the gradient of x in place.
    """
    results = cast(tuple[Tensor, ...], cast(Any, _Linears).apply(apart, x, *weights))
    if into is None:
        return results
    return tuple(y.view(*y.shape[:-1], *sizes) for y, sizes in zip(results, into, strict=True))


class _Linears(Function):
    @staticmethod
    def forward(ctx: Any, apart: Sequence[int], x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.weights = weights  # hooks may give back other tensors than the parameters
        if not _are_neighbours(weights):
            return tuple(F.linear(x, weight) for weight in weights)
        sizes = [weight.shape[0] for weight in weights]
        width = weights[0].shape[1]
        whole = weights[0].as_strided((sum(sizes), width), (width, 1))
        results = F.linear(x, whole).split_with_sizes(sizes, dim=-1)
        return tuple(y.contiguous() if i in apart else y for i, y in enumerate(results))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = cast(tuple[Tensor, ...], ctx.saved_tensors)
        _, of_x, *of_weights = cast(tuple[bool, ...], ctx.needs_input_grad)
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs]
        rows = x.reshape(-1, x.shape[-1])
        d_x = _summed(grads, weights).view(x.shape) if of_x else None
        asked = zip(ctx.weights, grads, of_weights, strict=True)
        d_weights = [now_or_later(w, partial(_of_weight, grad, rows)) if of else None for w, grad, of in asked]
        return None, d_x, *d_weights


def _of_weight(gradient: Tensor, rows: Tensor) -> Tensor:
    return gradient.mT @ rows


def _summed(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of the products of gradients [rows, n] with weights [n, k]."""
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total


def _are_neighbours(weights: Sequence[Tensor]) -> bool:
    """Whether contiguous matrices lie one behind the other in one piece of memory; in a graph nobody can say."""
    if is_compiling():
        return False
    return all(weight.is_contiguous() for weight in weights) and all(
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
        for first, second in pairwise(weights)
    )
