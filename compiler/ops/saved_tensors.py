"""The tensors that autograd saves for an op's backward, as the functions that emitted programs call
do it.

Saved tensors are operands, results, or others, which are known by their size alone.  These entries
were measured with torch 2.13.0 on the CPU through saved-tensor hooks, and tests check them so;
differences on CUDA are from torch's sources (derivatives.yaml), not measured.  Non-goals: which op
saves a tensor first, for how long (`analysis.memory`).
"""

from collections.abc import Callable
from typing import Literal

from attrs import frozen

from ..config.settings import TRITON
from ..ir import ITEM_BYTES, Op, Program, Type

Device = Literal["cpu", "cuda"]


@frozen
class Local:
    """An op as one rank does it.

    types   of the operands
    wanted  which operands get a gradient
    served  whether there is a tile that a kernel could run with
    """

    program: Program
    op: Op
    types: tuple[Type, ...]
    wanted: tuple[bool, ...] = ()
    device: Device = "cpu"
    served: bool = True

    def elements(self, operand: int = 0) -> int:
        """The number of elements of an operand on this rank."""
        return self.program.elements(self.types[operand])

    @property
    def item(self) -> int:
        """The bytes of an element of the first operand."""
        return ITEM_BYTES[self.types[0].dtype]

    def bytes(self, operand: int = 0) -> int:
        """The size in bytes of an operand on this rank."""
        return self.elements(operand) * ITEM_BYTES[self.types[operand].dtype]

    def wide_bytes(self, operand: int = 0) -> int:
        """The size in bytes of an operand in float32, or in float64 if it is that already."""
        return self.elements(operand) * self.wide

    @property
    def wide(self) -> int:
        """The bytes of an element of the sums over the first operand: 8 for f64, else 4."""
        return max(4, self.item)

    @property
    def is_narrow(self) -> bool:
        """Whether an element of the first operand has fewer bits than sums over it."""
        return self.item < self.wide

    @property
    def kernels(self) -> bool:
        """Whether the functions are of `scalec.runtime.kernels`: Triton's kernels, or what torch
        does there.
        """
        return self.program.train.kernels == TRITON

    @property
    def runs_kernel(self) -> bool:
        """Whether a Triton kernel runs, which holds nothing besides what its entry says; otherwise
        plain torch runs.
        """
        return (
            self.kernels and self.served and self.device == "cuda" and self.types[0].dtype != "f64"
        )


@frozen
class Saved:
    """Saved tensors: operands and results by their place, and other tensors by name and bytes."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    others: tuple[tuple[str, int], ...] = ()


Saves = Callable[[Local], Saved]
Bytes = Callable[[Local], int]
Views = Callable[[Program, Op], bool]


def operands(local: Local) -> Saved:
    """All operands."""
    return Saved(operands=tuple(range(len(local.types))))


def result(local: Local) -> Saved:
    """The result."""
    return Saved(results=(0,))


def results(local: Local) -> Saved:
    """All results."""
    return Saved(results=tuple(range(len(local.op.outputs))))


def factors(local: Local) -> Saved:
    """Each factor of a product that another factor's gradient needs."""
    return Saved(operands=tuple(i for i in (0, 1) if local.wanted[1 - i]))


def is_view(program: Program, op: Op) -> bool:
    """The results are views of the first operand."""
    return True
