"""Every kernel compiles for every chip, within its shared memory, and spills nothing.

No GPU is needed.
"""

import importlib
import math
from collections import defaultdict
from collections.abc import Iterable

import pytest
import torch

from helpers.kernels.cases import MODULES
from helpers.kernels.compiled import SPILLED, Launch, check, far_offsets, narrow_offsets, recorded
from helpers.kernels.machine_code import PRODUCTS, check_flow

FIRST, *OTHERS = [
    (90, torch.bfloat16),
    (80, torch.bfloat16),
    (90, torch.float32),
    (100, torch.bfloat16),
]
CHIPS = [
    (*FIRST, slice(None)),
    *((*chip, slice(0, None, 2)) for chip in OTHERS),
    *(pytest.param(*chip, slice(1, None, 2), marks=pytest.mark.long) for chip in OTHERS),
]
"""A chip, and which configurations of each kernel are compiled for it."""


@pytest.mark.sample(10)
@pytest.mark.parametrize(("capability", "dtype", "some"), CHIPS, ids=str)
@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_fits_the_chip(
    module: str, capability: int, dtype: torch.dtype, some: slice
) -> None:
    with recorded() as launches:
        importlib.import_module(f"helpers.kernels.{module}").examples("meta", dtype)
    assert launches, "the examples start no kernel"
    for launch in _of_each_kernel(some, launches):
        # float32 is not for speed
        code = check(launch, capability, SPILLED if dtype == torch.bfloat16 else math.inf)
        assert "mma" in code.ptx or launch.kernel.__name__ not in PRODUCTS, (
            f"{launch}: no tensor cores"
        )
        if launch.name.startswith("merge."):  # which no plan starts
            check_flow(launch, code, capability)


def _of_each_kernel(some: slice, launches: Iterable[Launch]) -> list[Launch]:
    """These among a kernel's launches that differ."""
    kernels = defaultdict[str, list[Launch]](list)
    for launch in {str(launch): launch for launch in launches}.values():
        kernels[launch.name].append(launch)
    return [launch for each in kernels.values() for launch in each[some]]


@pytest.mark.parametrize("module", MODULES)
def test_rows_lie_where_64_bits_say(module: str) -> None:
    """Tensors may have more elements than 32 bits count."""
    with recorded() as launches:
        importlib.import_module(f"helpers.kernels.{module}").examples("meta", torch.bfloat16)
    for launch in {str(launch): launch for launch in launches}.values():
        assert not narrow_offsets(launch), launch


@pytest.mark.parametrize(
    "module", [module for module in MODULES if module.startswith("cases_experts")]
)
def test_offsets_in_rows_of_experts_are_in_64_bits(module: str) -> None:
    """Rows are as many times more than tokens as experts are chosen; none of their offsets is
    in 32 bits too few.
    """
    with recorded() as launches:
        importlib.import_module(f"helpers.kernels.{module}").examples("meta", torch.bfloat16)
    for launch in {str(launch): launch for launch in launches}.values():
        assert not (far := far_offsets(launch)), f"{launch}: {far}"
