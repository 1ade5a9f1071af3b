"""Blocks that fit chips: by compute capability and head_dim for bfloat16 and float16, by head_dim for float32.

Chosen by what the compiler makes of them without a GPU: the largest of those tried whose kernels spill no register and
fit in shared memory, with every mask and cap; times on the chips may say otherwise.
"""

from collections.abc import Mapping

from .tiles import Block, Blocks

_OF_80 = {
    64: Blocks(Block(128, 64, warps=8, stages=3), Block(64, 64, warps=8, stages=2), Block(128, 32, warps=8, stages=2)),
    128: Blocks(Block(128, 32, warps=8, stages=3), Block(64, 64, warps=8, stages=2), Block(64, 64, warps=8, stages=2)),
}
_OF_90 = {
    64: Blocks(
        Block(128, 128, warps=8, stages=3), Block(32, 128, warps=8, stages=2), Block(128, 64, warps=8, stages=3)
    ),
    128: Blocks(
        Block(128, 64, warps=8, stages=3), Block(32, 128, warps=8, stages=2), Block(128, 64, warps=8, stages=2)
    ),
}
_OF_100 = {
    64: Blocks(Block(128, 64, warps=8, stages=2), Block(64, 128, warps=8, stages=2), Block(128, 64, warps=8, stages=3)),
    128: Blocks(
        Block(128, 64, warps=8, stages=3), Block(64, 128, warps=8, stages=2), Block(128, 64, warps=8, stages=2)
    ),
}
BLOCKS: Mapping[int, Mapping[int, Blocks]] = {80: _OF_80, 90: _OF_90, 100: _OF_100}

FLOAT32: Mapping[int, Blocks] = {
    64: Blocks(Block(32, 32, warps=4, stages=2), Block(32, 32, warps=8, stages=2), Block(32, 32, warps=4, stages=2)),
}
"""Products in float32 are exact ("ieee"), not on tensor cores, and slow."""
