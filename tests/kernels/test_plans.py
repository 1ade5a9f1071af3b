"""Every kernel that the programs of plans start, as they start it, compiles for every chip and fits it.  Without a GPU.

A plan's program runs a step on the meta device, where everything has its shape, element type and strides; what it
starts is listed, and compiled ahead of time.  What differs in sizes alone is one kernel to the compiler.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.cases_attention import call
from kernels.compiled import Launch, check, recorded
from kernels.programs import compiled, emitted, pretended, step
from scalec.compiler import kernels as table
from scalec.compiler.kernels import kernels_of
from scalec.compiler.limits import load
from scalec.runtime.kernels import Attention, Block, Blocks

PLANS = sorted((Path(__file__).parents[2] / "plans").glob("*.scale"))
TILES = tomllib.loads(Path(table.__file__).with_name("tiles.toml").read_text())
GPUS = {80: "a100_80gb", 90: "h100_sxm", 100: "b200"}
BLOCKS = [
    (int(chip.removeprefix("sm_")), int(dim))
    for chip, tiles in TILES.items()
    for dim in tiles.get("Attention", ())
    if dim != "256" or int(chip.removeprefix("sm_")) not in GPUS  # those are Gemma's
]


def _launches(path: Path, gpu: str) -> Iterator[Launch]:
    """What each rank of a plan starts that has other stages than the rest."""
    source = load(path)
    program = compiled(source, gpu)
    ranks = program.degree(tuple(axis.name for axis in program.axes))
    for rank in (0, ranks - 1) if program.pipeline else (0,):
        module = emitted(program, source)
        with pretended(ranks, rank), recorded() as launches:
            for used in kernels_of(program):
                _watch(module, used.function, launches)
            step(module, "meta")
        yield from launches


def _watch(module: ModuleType, function: str, launches: list[Launch]) -> None:
    """Has a function of kernels fail where it starts none; attention may be torch's."""
    op: Any = getattr(module, function)

    def watched(*operands: Any, **options: Any) -> Any:
        before = len(launches)
        result = op(*operands, **options)
        assert len(launches) > before or isinstance(op, Attention), f"{op} has no tile for {operands[0].shape}"
        return result

    setattr(module, function, watched)


@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_of_every_plan_fits_the_chip(capability: int) -> None:
    found = {str(launch): launch for path in PLANS for launch in _launches(path, GPUS[capability])}
    print(f"sm_{capability}: {len(found)} configurations of kernels in {len(PLANS)} plans")
    for launch in found.values():
        check(launch, capability)


def _blocks(tile: dict[str, dict[str, int]]) -> Blocks:
    return Blocks(**{part: Block(**block) for part, block in tile.items()})


@pytest.mark.parametrize(("capability", "dim"), BLOCKS)
def test_the_blocks_of_attention_fit_the_chip_with_every_mask(capability: int, dim: int) -> None:
    attention = Attention({dim: _blocks(TILES[f"sm_{capability}"]["Attention"][str(dim)])})
    with recorded() as launches:
        call(attention, dim, "meta", torch.bfloat16, window=1024, softcap=50.0, documents=True)
    for launch in launches:
        check(launch, capability)
