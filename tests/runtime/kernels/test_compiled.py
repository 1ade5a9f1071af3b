"""Every kernel compiles for every chip, within its shared memory, and spills nothing.  No GPU is needed."""

import importlib
import math

import pytest
import torch

from helpers.kernels.cases import MODULES
from helpers.kernels.compiled import SPILLED, check, narrow_offsets, recorded
from helpers.kernels.machine_code import check_flow

CHIPS = [(80, torch.bfloat16), (90, torch.bfloat16), (90, torch.float32), (100, torch.bfloat16)]


@pytest.mark.parametrize(("capability", "dtype"), CHIPS, ids=str)
@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_fits_the_chip(module: str, capability: int, dtype: torch.dtype) -> None:
    with recorded() as launches:
        importlib.import_module(f"helpers.kernels.{module}").examples("meta", dtype)
    assert launches, "the examples start no kernel"
    for launch in {str(launch): launch for launch in launches}.values():
        code = check(launch, capability, SPILLED if dtype == torch.bfloat16 else math.inf)  # float32 is not for speed
        if launch.name.startswith("merge."):  # which no plan starts
            check_flow(launch, code, capability)


@pytest.mark.parametrize("module", MODULES)
def test_rows_lie_where_64_bits_say(module: str) -> None:
    """Tensors may have more elements than 32 bits count."""
    with recorded() as launches:
        importlib.import_module(f"helpers.kernels.{module}").examples("meta", torch.bfloat16)
    for launch in {str(launch): launch for launch in launches}.values():
        assert not narrow_offsets(launch), launch
