"""Delayed weight gradients: the input part of backward leaves them for its weight part
(arXiv:2401.10241).

Purpose: `split_linear` and `split_embedding`.  Within `set_apart` their backward makes the gradient
of the input alone, and leaves a call that makes the weight's.  Elsewhere they are torch's own
functions, backward too.  `put_off` is for ops that have a backward of their own.
Non-goals: when each part runs (`pipeline`); gradients of other ops, which are computed with the
input's.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..comm.mesh import Axis
from .functional import embedding

Part = Callable[[], None]
"""Makes the gradients of some weights, one for most, and adds them where autograd would."""

# Where input parts under way leave calls, the innermost last.  It is global to the module, since on
# CUDA a thread of autograd's own runs backward: that thread sees neither the caller's thread-local
# values nor its context variables.
_left: list[list[Part]] = []
_backward: Callable[..., None] = cast(Any, torch.autograd).backward
_embedding_backward: Callable[..., Tensor] = cast(Any, torch.ops).aten.embedding_dense_backward


@contextmanager
def set_apart(parts: list[Part]) -> Generator[None]:
    """Within it, backward leaves in `parts` what only weights need."""
    _left.append(parts)
    try:
        yield
    finally:
        _left.pop()


def put_off(
    weights: Sequence[Tensor],
    gradients: Callable[[], Sequence[Tensor]],
    left: list[Part] | None = None,
) -> bool:
    """Leaves gradients of weights to be made later, together: within `set_apart`, or else in
    `left`, if it is given.  Returns whether it did.

    It does not where one of the weights is no parameter, nor where there are no weights.
    """
    if _left:
        left = _left[-1]
    if left is None or not weights or not all(weight.is_leaf for weight in weights):
        return False
    left.append(partial(_add, weights, gradients))
    return True


def split_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ.  x [..., i], weight [o, i].

    If the weight is no parameter but computed from one, backward goes on to that, and nothing is
    delayed.
    """
    if not weight.is_leaf:
        return F.linear(x, weight)
    return cast(Any, _Linear).apply(x, weight)


def split_embedding(tokens: Tensor, table: Tensor, axis: Axis | None = None) -> Tensor:
    """Rows of `table` [v, h], as `embedding` has them."""
    return embedding(tokens, table, axis, lookup=_rows)


def _rows(tokens: Tensor, table: Tensor) -> Tensor:
    if not table.is_leaf:
        return F.embedding(tokens, table)
    return cast(Any, _Rows).apply(tokens, table)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # hooks may give back another tensor than the parameter
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = grad_outputs, cast(tuple[Tensor, ...], ctx.saved_tensors)
        # Detached: a gradient that is put off would otherwise keep the graph that made x.
        make = partial(_linear_gradient, gradient, x.detach())
        of_weight = now_or_later(ctx.weight, make)
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_x, of_weight


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table = table
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (tokens,) = grad_outputs, cast(tuple[Tensor, ...], ctx.saved_tensors)
        size = ctx.table.shape[0]
        return None, now_or_later(
            ctx.table, partial(_embedding_backward, gradient, tokens, size, -1, False)
        )


def _linear_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).mT @ x.flatten(0, -2)


def now_or_later(
    weight: Tensor, gradient: Callable[[], Tensor], left: list[Part] | None = None
) -> Tensor | None:
    """A weight's gradient; None where it is put off."""
    if put_off([weight], lambda: [gradient()], left):
        return None
    return gradient()


def _add(weights: Sequence[Tensor], gradients: Callable[[], Sequence[Tensor]]) -> None:
    """Adds gradients to weights as autograd does, with the weights' hooks: where gradients are
    wider than weights, the hooks add.
    """
    with torch.enable_grad():
        later = cast(Any, _Later).apply(gradients, *weights)
    _backward(later, later.detach())


class _Later(Function):
    """Makes gradients of weights within autograd, which takes them as they are.  Autograd copies
    gradients that it is passed.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Callable[[], Sequence[Tensor]], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients()
