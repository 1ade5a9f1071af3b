"""Common parts of the cases of all ops: where they lie, tolerances, tensors, and gradients by
autograd.

A module `cases_OP.py` has functions `case_*(device)`, each of which raises where a kernel is wrong,
and `examples(device, dtype)`, which calls each kernel as large programs do, on a device where
nothing is computed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("cases_*.py"))


class Precision(NamedTuple):
    """An element type, and how far a result in it may be from one in float64, in units of the
    largest element.
    """

    dtype: torch.dtype
    atol: float
    rtol: float


PRECISIONS = {
    # the interpreter multiplies and rounds bfloat16 wrongly
    "cpu": (Precision(torch.float32, 2e-6, 1e-5),),
    "cuda": (
        Precision(torch.float32, 2e-6, 1e-5),
        Precision(torch.float16, 1e-3, 2e-3),
        Precision(torch.bfloat16, 8e-3, 1.6e-2),
    ),
}


def randn(*shape: int, precision: Precision, device: str, seed: int = 0) -> Tensor:
    """Normal numbers that the element type has exactly; they require gradients."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, precision.dtype).requires_grad_()


def moved(x: Tensor) -> Tensor:
    """x one element further on in memory, where no wide access may begin: as in a buffer,
    behind an odd bias.
    """
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def check_equal(actual: Tensor, expected: Tensor, precision: Precision, least: float = 1.0) -> None:
    """Raises where a result differs from one in float64 by more than the element type explains.

    least: the largest element, where none of the result is as large.
    """
    assert actual.dtype == precision.dtype, f"{actual.dtype} instead of {precision.dtype}"
    scale = expected.abs().max().item() if expected.numel() else 1.0
    wide = actual.detach().to("cpu", torch.float64)
    torch.testing.assert_close(
        wide, expected.detach().cpu(), atol=precision.atol * max(scale, least), rtol=precision.rtol
    )


def check_against(
    op: Callable[..., Tensor | tuple[Tensor, ...]],
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    precision: Precision,
    least: float = 1.0,
) -> None:
    """Holds results and gradients of `op` against those of a plain formula in float64, of the same
    tensors.

    The gradients of the results are random, the same for both; some results may have none, in both.
    least: of the gradients, as in `check_equal`.
    """
    wide = [tensor.detach().to("cpu", torch.float64).requires_grad_() for tensor in tensors]
    actual, expected = _tuple(op(*tensors)), _tuple(formula(*wide))
    for one, other in zip(actual, expected, strict=True):
        check_equal(one, other, precision)
    actual, expected = (
        [it for it in results if it.requires_grad] for results in (actual, expected)
    )
    seeds = [
        torch.randn(it.shape, generator=torch.Generator().manual_seed(7 + i))
        for i, it in enumerate(expected)
    ]
    seeds = [seed.to(precision.dtype) for seed in seeds]
    gradients = torch.autograd.grad(
        actual, list(tensors), [seed.to(actual[0].device) for seed in seeds]
    )
    right = torch.autograd.grad(expected, wide, [seed.double() for seed in seeds])
    for one, other in zip(gradients, right, strict=True):
        check_equal(one, other, precision, least)


def _tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
