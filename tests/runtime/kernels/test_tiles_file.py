"""The file of tiles beside a program: tiles by class and size, blocks of attention, the one of
an optimizer.
"""

import json
from hashlib import sha256
from pathlib import Path

from scalec.runtime.kernels import Block, Blocks, Product, Products, Tile, read_tiles

BLOCK = {"queries": 128, "keys": 32, "warps": 8, "stages": 2}
PRODUCT = {"rows": 128, "columns": 64, "terms": 32, "warps": 8, "stages": 3}
TILES = {
    "RMSNorm": {"64": {"rows": 16, "warps": 4, "programs": 1056}},
    "Attention": {"128": {"forward": BLOCK, "keys": BLOCK, "queries": BLOCK}},
    "GroupedLinear": {"768": {"of_rows": PRODUCT, "of_weight": PRODUCT}},
    "Rope": {},
    "AdamW": {"rows": 1, "warps": 4, "columns": 1024},
}


def test_tiles_are_read_as_kernels_take_them(tmp_path: Path) -> None:
    text = json.dumps({"written_by": "scalec", "chip": "sm_90", "tiles": TILES})
    (tmp_path / "tiles.json").write_text(text)
    block = Block(**BLOCK)
    assert read_tiles(
        "tiles.json", str(tmp_path / "train.py"), sha256(text.encode()).hexdigest()
    ) == {
        "RMSNorm": {64: Tile(rows=16, warps=4, programs=1056)},
        "Attention": {128: Blocks(block, block, block)},
        "GroupedLinear": {768: Products(Product(**PRODUCT), Product(**PRODUCT))},
        "Rope": {},
        "AdamW": Tile(rows=1, warps=4, columns=1024),
    }
