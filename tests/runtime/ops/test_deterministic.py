"""Deterministic kernels for some ops of a step: torch's switch is on while these run, forward
and backward.
"""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from scalec.runtime import attention
from scalec.runtime.ops import deterministic
from scalec.runtime.ops.deterministic import by_deterministic_kernels

Seen = list[tuple[str, bool]]


class _Looks(Function):
    """The identity, which notes the switch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, seen: Seen) -> Tensor:
        ctx.told = name, seen
        seen.append((name, torch.are_deterministic_algorithms_enabled()))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        name, seen = ctx.told
        seen.append((f"d {name}", torch.are_deterministic_algorithms_enabled()))
        return grad_outputs[0], None, None


def _looks(x: Tensor, name: str, seen: Seen) -> Tensor:
    return cast(Any, _Looks).apply(x, name, seen)


@pytest.mark.parametrize("was", [False, True])
def test_the_switch_is_on_for_an_op_and_its_gradient_alone(was: bool) -> None:
    seen: Seen = []
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.use_deterministic_algorithms(was)
    try:
        before, beside = _looks(x, "before", seen), _looks(y, "beside", seen)
        made = by_deterministic_kernels(lambda a, b: _looks(a * b, "inside", seen), before, beside)
        _looks(made.sin(), "after", seen).sum().backward()
        assert torch.are_deterministic_algorithms_enabled() == was
    finally:
        torch.use_deterministic_algorithms(False)
    assert {name: on for name, on in seen if not name.endswith("inside")} == dict.fromkeys(
        ("before", "beside", "after", "d before", "d beside", "d after"), was
    )
    assert [on for name, on in seen if name.endswith("inside")] == [True, True]
    due = torch.cos(x * y).detach()
    assert x.grad is not None
    assert torch.equal(x.grad, due * y.detach())


def test_the_switch_goes_back_where_an_op_fails() -> None:
    def fails(_: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        by_deterministic_kernels(fails, torch.ones(1))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kernel", ["flash", "none"])  # those that torch has on CPUs
def test_attention_is_of_a_kernel_that_can_be_deterministic(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the device had it; results and gradients are those of torch's attention."""
    for name in ("flash", "efficient"):
        monkeypatch.setattr(
            torch.backends.cuda, f"can_use_{name}_attention", lambda _, name=name: name == kernel
        )
    given = [torch.randn(2, 3, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = deterministic.attention(
        *given, attn_mask=None, is_causal=True, scale=None, enable_gqa=False
    )
    due = F.scaled_dot_product_attention(given[0], given[1], given[2], is_causal=True)
    torch.testing.assert_close(out, due)
    gradients = [torch.autograd.grad(each.square().sum(), given) for each in (out, due)]
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)
    assert (type(out.grad_fn).__name__ == "_LeftBackward") == (kernel != "none")


def test_on_cpus_attention_is_as_it_was() -> None:
    q, k, v = (torch.randn(2, 8, 3, 4) for _ in range(3))
    assert torch.equal(attention(q, k, v, deterministic=True), attention(q, k, v))
