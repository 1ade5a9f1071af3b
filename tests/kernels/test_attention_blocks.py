"""Attention's blocks for each chip: within its shared memory, and no register spilled."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cases_attention import call
from kernels.compiled import SHARED, compile_for, recorded
from scalec import compiler
from scalec.runtime.kernels import Attention, Block, Blocks

TILES = tomllib.loads((Path(compiler.__path__[0]) / "tiles.toml").read_text())
EVERYTHING = {"window": 1024, "softcap": 50.0, "documents": True}


def _blocks(capability: int, dim: int) -> Blocks:
    """What programs for a chip have."""
    parts = TILES[f"sm_{capability}"]["Attention"][str(dim)]
    return Blocks(**{name: Block(**part) for name, part in parts.items()})


@pytest.mark.parametrize(
    ("capability", "dim", "options"),
    [(80, 128, {}), (90, 64, {}), (90, 128, EVERYTHING), (100, 128, {})],
    ids=str,
)
def test_blocks_fit_their_chip(capability: int, dim: int, options: dict[str, Any]) -> None:
    with recorded() as launches:
        call(Attention({dim: _blocks(capability, dim)}), dim, "meta", torch.bfloat16, **options)
    assert len(launches) == 4
    for launch in launches:
        needs = compile_for(launch, capability)
        assert needs.shared <= SHARED[capability], f"{launch}: {needs}"
        assert needs.spilled == 0, f"{launch}: {needs}"
