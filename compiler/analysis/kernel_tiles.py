"""The functions of a program that are Triton kernels, and the tiles that they run with on a chip.

Purpose: what emitted programs say of kernels, and what they must cover.  The tiles are in
`tiles.toml`, by chip, class and size; `benchmarks/tune_kernels.py` measures them.  Non-goals: the
kernels (`runtime.kernels`).
"""

import json
import tomllib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from .. import __version__
from ..config.gpus import gpu
from ..config.settings import TRITON
from ..ir import ITEM_BYTES, Op, Program, Type, walk
from ..ops import OPS, VJPS
from ..ops.chunked_logits import few_columns, few_tokens
from .param_uses import leaves

Size = Callable[[Program, Sequence[Type], Op], int]
"""Gives the size that the tiles of an op are chosen by, from its operands."""

Tile = dict[str, Any]
"""The arguments of a tile; some may be tiles themselves."""

Tiles = dict[str, dict[str, Tile]]
"""The tiles of a chip: by class, and by size."""


def _of_weight(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The number of elements that a norm goes over: its weight's."""
    place = 2 if op.kind.startswith("add_") else 1
    return program.elements(operands[place])


def _last(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The last dim of the first operand."""
    return program.local_size(operands[0], operands[0].dims[-1])


def _columns(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The number of classes that a rank computes logits for."""
    return program.local_size(operands[1], operands[1].dims[0])


def _terms(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The number of terms of each sum of a product."""
    return prod(program.local_size(operands[0], dim) for dim in op.names("over"))


def _experts(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The number of experts, of all ranks."""
    return program.size(program.experts_of(op.outputs[0].type))


@frozen
class Kernel:
    """A class of `scalec.runtime.kernels`; a program makes a function of it and calls that.

    chunk  how much it works on at a time, from the largest of its sizes, if it takes that
    tile   the class of its tiles; only tiles of `Tile` serve all element types, and tiles of
           `Blocks` serve no size but their own
    tuned  the class whose tiles in the table it takes, if not its own
    """

    name: str
    size: Size
    chunk: Callable[[int], int] | None = None
    tile: str = "Tile"
    tuned: str = Factory(lambda self: self.name, takes_self=True)


KERNELS = {
    "add_layernorm": Kernel("AddLayerNorm", _of_weight),
    "add_rmsnorm": Kernel("AddRMSNorm", _of_weight),
    "attention": Kernel("Attention", _last, tile="Blocks"),
    "balance": Kernel("Balance", _last),
    "combine": Kernel("Combine", _last),
    "cross_entropy": Kernel("CrossEntropy", _last),
    "dispatch": Kernel("Dispatch", _last),
    "exchange": Kernel("Exchange", _last, tuned="Dispatch"),
    "exchange_back": Kernel("ExchangeBack", _last, tuned="Dispatch"),
    "exchange_counts": Kernel("ExchangeCounts", _experts, tuned="SortByExpert"),
    "gelu_mul": Kernel("GeluMul", _last),
    "grouped_contract": Kernel("GroupedLinear", _terms, tile="Products"),
    "layernorm": Kernel("LayerNorm", _of_weight),
    "linear_cross_entropy": Kernel("LinearCrossEntropy", _columns, few_tokens),
    "linear_softmax_stats": Kernel("LinearSoftmaxStats", _columns, few_columns),
    "logit_softmax_stats": Kernel("LogitSoftmaxStats", _last),
    "ring_attention": Kernel("RingAttention", _last, tile="Blocks", tuned="Attention"),
    "rmsnorm": Kernel("RMSNorm", _of_weight),
    "rope": Kernel("Rope", _last),
    "rope_pair": Kernel("RopePair", _last),
    "router_z": Kernel("RouterZ", _last),
    "silu_mul": Kernel("SiluMul", _last),
    "sort_by_expert": Kernel("SortByExpert", _experts),
    "top": Kernel("TopK", _last),
}
"""By the kind of op."""

BLOCKS = {2: "", 4: "32"}
"""The suffix of a class in the table, by the bytes of the elements that its tiles serve."""

OPTIMIZERS = {"adamw": "AdamW"}
"""The kernels of optimizers, by what plans call them."""

OTHERS = ("Accumulate", "read_tiles", *OPTIMIZERS.values())
"""Other names that a program may import from `scalec.runtime.kernels`."""

CHIPS = {120: "sm_120", 100: "sm_100", 90: "sm_90", 89: "sm_89", 86: "sm_86", 80: "sm_80"}
"""The chips that have tiles, newest first; a GPU counts as the newest that is no newer than it.

A chip takes the tiles of the next older one for each class that the table lacks for it.
"""

USUAL = "sm_90"
"""The chip of a plan that names no GPU."""


@frozen
class Used:
    """A function of a program that is a kernel: its class, and the tiles for the program's
    sizes.
    """

    function: str
    name: str
    tiles: tuple[tuple[int, Tile], ...]
    chunk: int | None = None


def chip(program: Program) -> str:
    """The chip whose tiles a program has."""
    known_gpu = gpu(program.cluster)
    if not known_gpu:
        return USUAL
    return chip_of(known_gpu.capability)


def chip_of(capability: int) -> str:
    """The chip whose tiles a GPU of this compute capability has, 8.6 as 86; it is 8.0 at least."""
    return next(name for least, name in CHIPS.items() if capability >= least)


def tiles_of(name: str) -> Mapping[str, dict[str, Tile]]:
    """By class, and by size; a class that the chip lacks has the tiles of the next older one."""
    names = [*CHIPS.values()]
    table = _table()
    return ChainMap(*(table.get(chip, {}) for chip in names[names.index(name) :]))


def nearest(tiles: Mapping[str, Tile], size: int) -> Tile:
    """The tile of this size, or of the next larger one in the table, or of the largest."""
    sizes = sorted(map(int, tiles))
    for tile_size in sizes:
        if tile_size >= size:
            return tiles[str(tile_size)]
    return tiles[str(sizes[-1])]


def kernels_of(program: Program) -> list[Used]:
    """The kernels that a program calls, by their functions; backward has the tiles of the op that
    it is backward of.
    """
    if program.train.kernels != TRITON:
        return []
    sizes = dict[str, dict[int, int]]()  # by kind of op and size, the bytes of the widest element
    for op in walk(program.forward.body):
        if op.kind not in KERNELS:
            continue
        operands = program.operands(op)
        size = KERNELS[op.kind].size(program, operands, op)
        kind_sizes = sizes.setdefault(op.kind, {})
        kind_sizes[size] = max(kind_sizes.get(size, 0), ITEM_BYTES[operands[0].dtype])
    tiles = tiles_of(chip(program))
    used = list[Used]()
    for kind, kind_sizes in sizes.items():
        used.append(_make_used(kind, sorted(kind_sizes.items()), tiles))
    return sorted(used, key=lambda kernel: kernel.function)


def serves(program: Program, op: Op, operands: Sequence[Type]) -> bool:
    """Whether there is a tile for an op, or for its backward, of operands on one rank; true for an
    op that is no kernel.
    """
    op, operands = VJPS.forward(op, operands)
    kernel = KERNELS.get(op.kind)
    if program.train.kernels != TRITON or not kernel or kernel.tile == "Tile":
        return True
    size = kernel.size(program, operands, op)
    return bool(_tile(kernel, size, ITEM_BYTES[operands[0].dtype], tiles_of(chip(program))))


def optimizer_kernel(program: Program) -> str:
    """The class of the optimizer's kernel; "" where the optimizer is torch's."""
    if program.train.kernels != TRITON:
        return ""
    return OPTIMIZERS.get(program.train.optimizer.kind, "")


def tiles_file(program: Program) -> dict[str, str]:
    """The file that a program with kernels reads their tiles from, name → text: by class and
    size, of one chip.
    """
    if program.train.kernels != TRITON:
        return {}
    tiles: dict[str, dict[str, Tile]] = {}
    for used in kernels_of(program):
        tiles[used.name] = {str(size): tile for size, tile in used.tiles}
    if name := optimizer_kernel(program):
        (tiles[name],) = tiles_of(chip(program))[name].values()
    fields = {"written_by": f"scalec {__version__}", "chip": chip(program), "tiles": tiles}
    return {"tiles.json": f"{json.dumps(fields, indent=1)}\n"}


def accumulates(program: Program) -> bool:
    """Whether gradients are added up by a kernel: narrow ones to wide ones."""
    dtypes = {program.types[name].dtype for name in leaves(program)}
    return program.train.kernels == TRITON and len(dtypes) > 1


@cache
def _table() -> dict[str, Tiles]:
    """By chip."""
    return tomllib.loads(Path(__file__).with_name("tiles.toml").read_text(encoding="utf-8"))


def _make_used(
    kind: str, sizes: Sequence[tuple[int, int]], tiles: Mapping[str, dict[str, Tile]]
) -> Used:
    """For some sizes, each with the bytes of its widest elements."""
    kernel = KERNELS[kind]
    chosen = list[tuple[int, Tile]]()
    for size, item in sizes:
        if tile := _tile(kernel, size, item, tiles):
            chosen.append((size, tile))
    chunk = kernel.chunk and kernel.chunk(sizes[-1][0])
    return Used(OPS[kind].function, kernel.name, tuple(chosen), chunk)


def _tile(
    kernel: Kernel, size: int, item: int, tiles: Mapping[str, dict[str, Tile]]
) -> Tile | None:
    """The tile for a size, and elements of `item` bytes; None where the table has none."""
    if kernel.tile == "Tile":
        return nearest(tiles.get(kernel.tuned, {}), size)
    if item not in BLOCKS:
        return None
    tiles_by_size = tiles.get(kernel.tuned + BLOCKS[item], {})
    if tiles_by_size and kernel.tile == "Products":
        return nearest(tiles_by_size, size)
    return tiles_by_size.get(str(size))
