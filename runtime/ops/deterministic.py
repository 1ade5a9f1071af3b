"""Ops whose kernels on GPUs give the same bits each time, forward and backward, while other ops
need not.

torch has one switch for all of a process (`torch.use_deterministic_algorithms`), which kernels look
at when they start.  Non-goals: which ops need it (the compiler says), ops that have no
deterministic kernel.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

_CUDA: Any = torch.backends.cuda
_SDPA = torch.nn.functional.scaled_dot_product_attention
# The public functions of the switch would import torch._inductor.
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class _Switch:
    """The switch, put on and back to where it was."""

    def __init__(self) -> None:
        self._was = False, False, False

    def on(self) -> None:
        fills = _C._get_deterministic_fill_uninitialized_memory()
        self._was = (
            _C._get_deterministic_algorithms(),
            _C._get_deterministic_algorithms_warn_only(),
            fills,
        )
        _C._set_deterministic_algorithms(True, warn_only=False)
        _C._set_deterministic_fill_uninitialized_memory(False)

    def back(self) -> None:
        was, warns, fills = self._was
        _C._set_deterministic_algorithms(was, warn_only=warns)
        _C._set_deterministic_fill_uninitialized_memory(fills)


@contextmanager
def deterministic() -> Generator[None]:
    """Kernels that start inside give the same bits each time."""
    switch = _Switch()
    switch.on()
    try:
        yield
    finally:
        switch.back()


def by_deterministic_kernels(op: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """`op(*operands)`, whose gradients are made by deterministic kernels too.  Not for graphs."""
    switch = _Switch()
    with deterministic():
        result = op(*cast(Any, _Entered).apply(switch, *operands))
    return cast(Any, _Left).apply(switch, result)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """As `scaled_dot_product_attention`, by a kernel of torch's that has a deterministic form,
    flash or memory-efficient attention, or where neither takes the call by products, which add in
    one order anyway.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel  # which loads sympy and more

    call = partial(
        _SDPA, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    # torch's, of a causal mask that ends lower right
    is_bias = attn_mask is not None and type(attn_mask) is not Tensor
    seen = (None, 0.0, True) if is_bias else (attn_mask, 0.0, is_causal)
    params = _CUDA.SDPAParams(q, k, v, *seen, enable_gqa)
    for kernel, takes in (
        (SDPBackend.FLASH_ATTENTION, _CUDA.can_use_flash_attention),
        (SDPBackend.EFFICIENT_ATTENTION, _CUDA.can_use_efficient_attention),
    ):
        if takes(params):
            with sdpa_kernel(kernel):
                return by_deterministic_kernels(call, q, k, v)
    with sdpa_kernel(SDPBackend.MATH):
        return call(q, k, v)


class _Entered(Function):
    """The operands; backward leaves here."""

    @staticmethod
    def forward(ctx: Any, switch: _Switch, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.switch = switch
        return tuple(operand.view_as(operand) for operand in operands)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.switch.back()
        return None, *grad_outputs


class _Left(Function):
    """The result; backward enters here."""

    @staticmethod
    def forward(ctx: Any, switch: _Switch, result: Tensor) -> Tensor:
        ctx.switch = switch
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.switch.on()
        return None, *grad_outputs
