"""Reads the tiles of a program's kernels from the file beside it.

Non-goals: which tiles these are (`benchmarks/tune_kernels.py` measures them).
"""

import json
from typing import Any

from ..train.companion_files import text_beside
from .attention.tiles import Block, Blocks
from .experts.grouped_linear import Product, Products
from .launching import Tile


def read_tiles(name: str, beside: str, sha256: str) -> dict[str, Any]:
    """The tiles of each kernel class by its name: a tile for each size, or an optimizer's one tile.

    Ends the program with status 2 where `read_schedule` would.
    """
    classes: dict[str, Any] = json.loads(text_beside(name, beside, sha256))["tiles"]
    return {kernel: _tiles(entry) for kernel, entry in classes.items()}


def _tiles(entry: dict[str, Any]) -> Any:
    if "of_rows" in entry:
        return Products(**{part: Product(**block) for part, block in entry.items()})
    if "rows" in entry:
        return Tile(**entry)
    if "forward" in entry:
        return Blocks(**{part: Block(**block) for part, block in entry.items()})
    return {int(size): _tiles(tile) for size, tile in entry.items()}
