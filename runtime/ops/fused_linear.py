"""Several linear layers of one value as one product, for weights adjacent in memory.

Purpose: forward is one product.  So is backward, once for x and once for the weights, where that
costs no more memory traffic than it saves.  Non-goals: which products go together (the compiler's),
where weights lie (`state.layout`).
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from .delayed_wgrad import put_off


def join(first: Tensor, whole: Tensor) -> None:
    """Makes `fused_linear` take `whole` [Σn, k], their common memory, for the weights that
    begin with `first`.
    """
    cast(Any, first).whole = whole


def fused_linear(
    x: Tensor,
    *weights: Tensor,
    into: Sequence[Sequence[int]] | None = None,
    apart: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """x · wᵀ for each of `weights` [n, k]: x [..., k], results [..., n], or the last dim
    unflattened `into` dims.

    It is one product with the matrix that the weights were joined to (`ParamGroup`), also in a
    graph of torch.compile: the matrix is an input of the graph like each weight.  The results are
    slices that keep all of the product alive; the results in `apart` are copies.

    Gradients of the results, [rows, n], may come as slices of one tensor, as `silu_mul` gives them;
    then backward too is one product for x and one for all weights.  Else they are copied into one,
    which reads and writes rows · Σn elements, where that is no more than it saves: of m products
    for x all but one read and write the sum so far, rows · k · (m - 1) elements.  So queries, keys
    and values are one product if keys have fewer heads (Σn = 1.5 k of 8 : 2 : 2 heads), or over
    several ranks; gates of 3.5 k each are not.  In a graph nobody sees where gradients lie.
    """
    whole: Tensor | None = getattr(weights[0], "whole", None)
    assert whole is not None, "fused_linear: weights that no group has side by side"
    results = cast(tuple[Tensor, ...], cast(Any, _Linears).apply(apart, x, whole, *weights))
    if into is None:
        return results
    return tuple(y.view(*y.shape[:-1], *sizes) for y, sizes in zip(results, into, strict=True))


class _Linears(Function):
    @staticmethod
    def forward(
        ctx: Any, apart: Sequence[int], x: Tensor, whole: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, whole)
        ctx.weights = weights
        sizes = [weight.shape[0] for weight in weights]
        assert sum(sizes) == whole.shape[0], (
            "fused_linear: other weights than those that are joined"
        )
        results = [*F.linear(x, whole).split_with_sizes(sizes, dim=-1)]
        for i in apart:
            results[i] = results[i].contiguous()
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, whole = cast(tuple[Tensor, ...], ctx.saved_tensors)
        _, of_x, _, *of_weights = cast(tuple[bool, ...], ctx.needs_input_grad)
        # Detached: a gradient that is put off would otherwise keep the graph that made x.
        rows = x.detach().reshape(-1, x.shape[-1])
        grads = _together(
            [grad.reshape(-1, grad.shape[-1]) for grad in grad_outputs], whole.shape[1]
        )
        d_x = _sum_of_products(grads, whole).view(x.shape) if of_x else None
        make = partial(_of_weights, grads, rows, [weight.shape[0] for weight in ctx.weights])
        if not any(of_weights) or put_off(ctx.weights, make):
            return None, d_x, None, *([None] * len(of_weights))
        d_weights: list[Tensor | None] = []  # dynamo traces no call of `list[…]`
        for grad, needed in zip(make(), of_weights, strict=True):
            d_weights.append(grad if needed else None)
        return None, d_x, None, *d_weights


def _together(grads: list[Tensor], width: int) -> list[Tensor]:
    """Gradients [rows, n] as one [rows, Σn], if they lie so or a copy costs no more than it
    saves; else as they are.
    """
    if (whole := joint_tensor(grads)) is not None:
        return [whole]
    if not copies_into_one([grad.shape[1] for grad in grads], width):
        return grads
    return [torch.cat(grads, dim=1)]


def copies_into_one(sizes: Sequence[int], width: int) -> bool:
    """Whether gradients of these sizes, for weights [n, width], are copied into one: by a count
    of what is moved.
    """
    return sum(sizes) <= width * (len(sizes) - 1)


def _sum_of_products(grads: Sequence[Tensor], whole: Tensor) -> Tensor:
    """The sum of the products of gradients [rows, n] with the parts of the weights [Σn, k]."""
    weights = whole.split_with_sizes([grad.shape[1] for grad in grads])
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total


def _of_weights(grads: Sequence[Tensor], rows: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The gradients of weights with `sizes` rows: slices of one, of joint gradients."""
    gradients = [grad.mT @ rows for grad in grads]
    if len(gradients) < len(sizes):
        return gradients[0].split_with_sizes(sizes)
    return gradients


# ---- adjacent tensors: consecutive slices of the last dim of one


def joint_tensor(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor [..., Σn] that `parts` [..., n] are slices of; None if they are not."""
    if not are_adjacent(parts):
        return None
    first = parts[0]
    width = sum(part.shape[-1] for part in parts)
    return first.as_strided((*first.shape[:-1], width), first.stride())


def are_adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before ends, in each row of one piece of memory; in a
    graph nobody can say.
    """
    if is_compiling() or any(part.stride(-1) != 1 for part in parts):
        return False
    return all(_follows(first, second) for first, second in pairwise(parts))


def _follows(first: Tensor, second: Tensor) -> bool:
    """Whether the rows of the second tensor begin where the rows of the first end."""
    return (
        _storage(first) == _storage(second)
        and first.stride() == second.stride()
        and first.shape[:-1] == second.shape[:-1]
        and first.storage_offset() + first.shape[-1] == second.storage_offset()
    )


def _storage(x: Tensor) -> int:
    return cast(Any, x.untyped_storage())._cdata


def empty_adjacent_like(parts: Sequence[Tensor]) -> list[Tensor]:
    """Empty tensors like `parts` [..., n], which lie as the parts do: as slices of one tensor, or
    each in memory of its own.
    """
    if not are_adjacent(parts):
        return [part.new_empty(part.shape) for part in parts]
    sizes = [part.shape[-1] for part in parts]
    return [*parts[0].new_empty((*parts[0].shape[:-1], sum(sizes))).split_with_sizes(sizes, dim=-1)]
