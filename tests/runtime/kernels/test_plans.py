"""Every kernel that the programs of plans start, as they start it, compiles for every chip and fits
it.  Without a GPU.

What differs in sizes alone is one kernel to the compiler, but for whether 16 divides them.
"""

import math
import tomllib
from pathlib import Path

import pytest
import torch

from helpers.kernels.cases_attention import call
from helpers.kernels.cases_experts_grouped_linear import Given
from helpers.kernels.compiled import SHARED, SPILLED, check, recorded
from helpers.kernels.launches import GPUS, PLANS, distinct
from helpers.kernels.machine_code import PRODUCTS, check_flow, is_aligned, is_bound
from scalec.compiler.analysis import kernel_tiles as table
from scalec.runtime.kernels import Attention, Block, Blocks, GroupedLinear, Product, Products

TILES = tomllib.loads(Path(table.__file__).with_name("tiles.toml").read_text())
BLOCKS = [
    (int(chip.removeprefix("sm_")), int(dim), dtype)
    for chip, tiles in TILES.items()
    for name, dtype in (("Attention", torch.bfloat16), ("Attention32", torch.float32))
    for dim in tiles.get(name, ())
    if dim != "256" or int(chip.removeprefix("sm_")) not in GPUS  # those are Gemma's
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_of_a_plan_fits_the_chip(capability: int, plan: Path) -> None:
    """Plans of one family start kernels that are the same, which Triton compiles once."""
    for launch in distinct(GPUS[capability], [plan]):
        code = check(launch, capability)
        if is_bound(launch) and is_aligned(launch):
            check_flow(launch, code, capability)


def _blocks(tile: dict[str, dict[str, int]]) -> Blocks:
    return Blocks(**{part: Block(**block) for part, block in tile.items()})


@pytest.mark.sample(3)
@pytest.mark.parametrize(("capability", "dim", "dtype"), BLOCKS, ids=str)
def test_the_blocks_of_attention_fit_the_chip_with_every_mask(
    capability: int, dim: int, dtype: torch.dtype
) -> None:
    name = "Attention" if dtype == torch.bfloat16 else "Attention32"
    attention = Attention({dim: _blocks(TILES[f"sm_{capability}"][name][str(dim)])})
    with recorded() as started:
        call(attention, dim, "meta", dtype, window=1024, softcap=50.0, documents=True)
    for launch in started:
        code = check(launch, capability)
        assert (name, capability) != ("Attention32", 80) or code.shared <= SHARED[86], (
            f"{launch}: sm_86 has those of sm_80"
        )
        assert "mma" in code.ptx or launch.kernel.__name__ not in PRODUCTS, (
            f"{launch}: no tensor cores"
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", SHARED)
def test_the_blocks_of_products_by_expert_fit_the_chip(capability: int, dtype: torch.dtype) -> None:
    """Of rows and weights, forward and backward; those of float32 are not for speed."""
    name = "GroupedLinear" if dtype == torch.bfloat16 else "GroupedLinear32"
    blocks = table.tiles_of(table.chip_of(capability))[name]["4096"]
    tile = Products(**{part: Product(**block) for part, block in blocks.items()})
    x = torch.empty(64, 4096, device="meta", dtype=dtype, requires_grad=True)
    weight = torch.empty(4, 1024, 4096, device="meta", dtype=dtype, requires_grad=True)
    with recorded() as started:
        y = GroupedLinear({4096: tile})(x, weight, Given((16,) * 4, "meta"))
        y.backward(torch.empty_like(y))
    assert len(started) == 3
    for launch in started:
        code = check(launch, capability, SPILLED if dtype == torch.bfloat16 else math.inf)
        assert "mma" in code.ptx, f"{launch}: no tensor cores"
