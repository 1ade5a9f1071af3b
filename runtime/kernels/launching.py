"""Launches the kernels of this package, and says which calls they support.

The torch twin of the same op does the other calls: all calls on the CPU, and on a GPU the sizes and
dtypes that the table of tiles leaves out, which the log says once.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast

import torch
import triton  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

INTERPRETED = bool(cast(Any, triton).knobs.runtime.interpret)
"""Whether TRITON_INTERPRET was set when triton was imported: kernels then run on the CPU."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that kernels read and write; inside they compute in float32."""

AnyTile = TypeVar("AnyTile")


@dataclass(frozen=True)
class Tile:
    """The part that one program of a kernel works on at a time: `rows` rows, each whole or in
    blocks of `columns`.

    columns: 0 for whole rows, else a power of two.  programs: the number of programs where each
    takes several tiles in turn; all should fit on the chip at once.  The default is two for each
    multiprocessor of an H100.
    """

    rows: int
    warps: int
    columns: int = 0
    programs: int = 264

    def across(self, width: int) -> int:
        """The columns of a block, of rows of this width."""
        return self.columns or next_power_of_two(width)

    def options(self, width: int, columns: int) -> dict[str, int]:
        """The constants of a kernel for rows of this width in blocks of `columns`, and the options
        of `launch`, by name.
        """
        return {"WIDTH": width, "COLUMNS": columns, "ROWS": self.rows, "warps": self.warps}


@dataclass(frozen=True, eq=False)
class Tiled(Generic[AnyTile]):
    """An op of emitted programs, with the tiles of its kernel by the size that each op's
    docstring names.
    """

    tiles: Mapping[int, AnyTile]

    def tile_for(
        self, size: int, *tensors: Tensor | None, dtypes: Collection[torch.dtype] = DTYPES
    ) -> AnyTile | None:
        """The tile for some tensors, as `tile_for` of this module."""
        return tile_for(self, self.tiles, size, *tensors, dtypes=dtypes)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    stages: int | None = None,
    **constants: Any,
) -> None:
    """Starts `kernel` on the current device, with its constexpr parameters by name; an empty
    grid starts nothing.
    """
    if 0 in grid:
        return
    options = {"num_warps": warps}
    if stages is not None:
        options["num_stages"] = stages
    kernel[grid](*args, **constants, **options)


def tile_for(
    op: object,
    tiles: Mapping[int, AnyTile],
    size: int,
    *tensors: Tensor | None,
    dtypes: Collection[torch.dtype] = DTYPES,
) -> AnyTile | None:
    """The tile that the kernel of `op` uses for these tensors, or None where torch computes the op.
    A tensor that an op may do without is None.

    A tensor on the meta device counts as one on a GPU, so that launches can be listed without one.
    """
    first = tensors[0]
    assert first is not None, "kernels: an op without operands"
    if not (first.is_cuda or first.is_meta or INTERPRETED):
        return None
    odd = [tensor.dtype for tensor in tensors if tensor is not None and tensor.dtype not in dtypes]
    tile = None if odd else tiles.get(size)
    if tile is None and first.is_cuda:
        reason = str(odd[0]) if odd else f"size {size}, which has no tile"
        _say(type(op).__name__, reason)
    return tile


@cache
def _say(op: str, reason: str) -> None:
    """Warns that torch does an op's work, once for each op and reason."""
    logging.getLogger("scalec").warning("%s: plain torch instead of a kernel, for %s", op, reason)


def matrix(x: Tensor, width: int) -> Tensor:
    """x as [rows, width] with neighbours in memory along the width; a copy where its rows are
    not evenly spaced.
    """
    flat = x.reshape(x.numel() // width, width)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    return flat


def evenly(size: int) -> list[slice]:
    """`size` elements in up to two parts: as many as 16 divides, and the remaining ones.

    For sizes that 16 divides Triton compiles another kernel, with accesses of 16 bytes; with a mask
    by any other size, accesses are of one element.
    """
    even = size - size % 16
    parts = (slice(0, even), slice(even, size))
    return [part for part in parts if part.start < part.stop]


def blocks(size: int, block_size: int) -> int:
    """How many blocks of `block_size` cover `size`."""
    return -(-size // block_size)


def next_power_of_two(size: int) -> int:
    """The next power of two, which Triton wants of a block."""
    return 1 << (size - 1).bit_length()
