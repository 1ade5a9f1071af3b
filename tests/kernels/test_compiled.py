"""Every kernel compiles for every chip, within its shared memory, and spills next to nothing.  No GPU is needed."""

import importlib
import time

import pytest
import torch

from kernels.cases import MODULES
from kernels.compiled import SHARED, compile_for, recorded

SECONDS = 30
"""What compiling one kernel may take; half a second is usual."""

SPILLED = 16
"""Bytes a thread that may be put aside in the element type of large models; float32 is not for speed."""

CHIPS = [(80, torch.bfloat16), (90, torch.bfloat16), (90, torch.float32), (100, torch.bfloat16)]


@pytest.mark.parametrize(("capability", "dtype"), CHIPS, ids=str)
@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_fits_the_chip(module: str, capability: int, dtype: torch.dtype) -> None:
    with recorded() as launches:
        importlib.import_module(f"kernels.{module}").examples("meta", dtype)
    assert launches, "the examples start no kernel"
    for launch in {str(launch): launch for launch in launches}.values():
        began = time.monotonic()
        needs = compile_for(launch, capability)
        assert time.monotonic() - began < SECONDS, str(launch)
        assert needs.shared <= SHARED[capability], f"{launch}: {needs}"
        assert needs.spilled <= SPILLED or dtype == torch.float32, f"{launch}: {needs}"
