"""Which tensors are slices of one, one behind the other."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from scalec.runtime.ops.fused_linear import empty_adjacent_like, joint_tensor

WHOLE = torch.arange(60.0).view(2, 3, 10)
APART = {
    "in another order": [WHOLE[..., 4:], WHOLE[..., :4]],
    "with a gap": [WHOLE[..., :4], WHOLE[..., 5:]],
    "overlapping": [WHOLE[..., :4], WHOLE[..., 3:]],
    "of other memory": [WHOLE[..., :4], WHOLE.clone()[..., 4:]],
    "of other rows": [WHOLE[:1, :, :4], WHOLE[1:, :, 4:]],
    "with gaps inside": [WHOLE[..., 0:4:2], WHOLE[..., 4:8:2]],
    "dense": [WHOLE[0], WHOLE[1]],
}


def test_slices_are_joined_to_what_they_are_of() -> None:
    for parts in (
        WHOLE.split([4, 5, 1], -1),
        WHOLE[1:].split([3, 7], -1),
        WHOLE[..., 2:8].split([4, 2], -1),
    ):
        found = joint_tensor(parts)
        assert found is not None
        assert torch.equal(found, torch.cat(parts, -1))
        assert found.data_ptr() == parts[0].data_ptr()


@pytest.mark.parametrize("parts", APART.values(), ids=[*APART])
def test_others_are_not(parts: Sequence[Tensor]) -> None:
    assert joint_tensor(parts) is None


def test_new_tensors_lie_as_others_do() -> None:
    found = empty_adjacent_like(WHOLE.split([4, 6], -1))
    assert [it.shape for it in found] == [(2, 3, 4), (2, 3, 6)]
    assert joint_tensor(found) is not None
    assert all(it.is_contiguous() for it in empty_adjacent_like(APART["with a gap"]))
