"""The hooks of a look for the first value that is not finite: none is left, however the step
ends.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from scalec.runtime.debug.first_value import FirstValue


@pytest.mark.parametrize("raises", [False, True])
def test_no_hook_is_left(raises: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with (
        pytest.raises(RuntimeError) if raises else nullcontext(),
        FirstValue(model, __file__) as seen,
    ):
        model(torch.full((3, 5 if raises else 2), torch.nan))
    assert bool(seen.found) != raises
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
