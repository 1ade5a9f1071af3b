"""Sums of gradients in an element type of their own: what is sent, and where the sum ends up."""

import pytest
import torch
from torch import Tensor

from helpers.forked_ranks import run_ranks
from scalec.runtime import Mesh, all_reduce_, reduce_scatter_

NARROW = [torch.bfloat16, torch.float16]


def _values(rank: int) -> Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(rank))


def _summed(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All of the sum, and this rank's part of it."""
    axis = Mesh({"dp": 2}).axis("dp")
    whole, parts = _values(axis.rank), _values(axis.rank)
    assert all_reduce_(whole, axis, dtype=dtype) is whole
    part = reduce_scatter_(parts, axis, dtype=dtype)
    assert part.data_ptr() == parts[32 * axis.rank :].data_ptr()
    return whole, part


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_sum_is_of_what_was_cast_and_is_cast_back_in_place(dtype: torch.dtype) -> None:
    (first, upper), (second, lower) = run_ranks(2, _summed, dtype)
    a, b = _values(0), _values(1)
    expected = (a.to(dtype) + b.to(dtype)).float()
    assert not torch.equal(expected, a + b)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert torch.equal(torch.cat([upper, lower]), expected)
