"""Which functions of a program are Triton kernels, and with which tiles they run on which chip.

Purpose: what emitted programs say of kernels, and what they must cover.  The tiles stand in `tiles.toml`, by chip,
class and size; `benchmarks/tune_kernels.py` measures them.  Non-goals: the kernels (`runtime.kernels`).
"""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen

from .gpus import gpu
from .ir import Op, Program, Type, types, walk
from .ops import OPS
from .ops.head import few_columns, few_tokens
from .settings import TRITON

Size = Callable[[Program, Sequence[Type], Op], int]
"""By what the tiles of an op are chosen, from its operands."""

Tiles = dict[str, dict[str, dict[str, int]]]
"""Of a chip: by class, and by size, the arguments of `Tile`."""


def _of_weight(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The elements over which a norm goes, those of its weight."""
    return program.elements(operands[2 if op.kind.startswith("add_") else 1])


def _last(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The last dim of the first operand."""
    return program.local_size(operands[0], operands[0].dims[-1])


def _columns(program: Program, operands: Sequence[Type], op: Op) -> int:
    """The classes of which a rank makes logits."""
    return program.local_size(operands[1], operands[1].dims[0])


@frozen
class Kernel:
    """A class of `scalec.runtime.kernels`, of which a program makes the function that it calls.

    chunk  how much it works on at a time, from the largest of its sizes, if it takes that
    """

    name: str
    size: Size
    chunk: Callable[[int], int] | None = None


KERNELS = {
    "add_layernorm": Kernel("AddLayerNorm", _of_weight),
    "add_rmsnorm": Kernel("AddRMSNorm", _of_weight),
    "cross_entropy": Kernel("CrossEntropy", _last),
    "gelu_mul": Kernel("GeluMul", _last),
    "layernorm": Kernel("LayerNorm", _of_weight),
    "linear_cross_entropy": Kernel("LinearCrossEntropy", _columns, few_tokens),
    "linear_parts": Kernel("LinearParts", _columns, few_columns),
    "rmsnorm": Kernel("RMSNorm", _of_weight),
    "rope": Kernel("Rope", _last),
    "rope_pair": Kernel("RopePair", _last),
    "silu_mul": Kernel("SiluMul", _last),
}
"""By the kind of op."""

PLAIN = ("rejoined",)
"""Functions of `scalec.runtime.kernels` that need no tiles."""

CHIPS = {100: "sm_100", 90: "sm_90", 80: "sm_80"}
"""Those with tiles of their own, newest first; a GPU has those of the newest that is no newer than it."""

USUAL = "sm_90"
"""The chip of a plan that names no GPU."""


@frozen
class Used:
    """A function of a program that is a kernel: its class, and the tiles for the sizes that the program has."""

    function: str
    name: str
    tiles: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
    chunk: int | None = None


def chip(program: Program) -> str:
    """The chip whose tiles a program has."""
    found = gpu(program)
    return next((name for least, name in CHIPS.items() if found and found.capability >= least), USUAL)


def kernels_of(program: Program) -> list[Used]:
    """The kernels that a program calls, by their functions."""
    if program.train.kernels != TRITON:
        return []
    known, sizes = types(program), dict[str, set[int]]()
    for op in walk(program.region.body):
        if op.kind in KERNELS:
            operands = [known[name] for name in op.inputs]
            sizes.setdefault(op.kind, set()).add(KERNELS[op.kind].size(program, operands, op))
    tiles: Tiles = tomllib.loads(Path(__file__).with_name("tiles.toml").read_text())[chip(program)]
    used = (_used(kind, sorted(found), tiles) for kind, found in sizes.items())
    return sorted(used, key=lambda each: each.function)


def _used(kind: str, sizes: list[int], tiles: Tiles) -> Used:
    kernel = KERNELS[kind]
    chosen = tuple((size, _tile(tiles[kernel.name], size)) for size in sizes)
    return Used(OPS[kind].function, kernel.name, chosen, kernel.chunk and kernel.chunk(sizes[-1]))


def _tile(tiles: dict[str, dict[str, int]], size: int) -> tuple[tuple[str, int], ...]:
    """The tile of this size, or of the next larger one of which there is one, or of the largest."""
    known = sorted(map(int, tiles))
    nearest = next((each for each in known if each >= size), known[-1])
    return tuple(tiles[str(nearest)].items())
