"""A gather whose result autograd does not save: backward gathers once more."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..autograd.recompute import Around
from .collectives import all_gather, gather
from .mesh import Axis


class _Gathered:
    """The gathered tensor as backward sees it: gathered when its first consumer needs it, freed after its last."""

    def __init__(self, packed: Any, around: Around, axis: Axis, dim: int, zigzag: bool) -> None:
        self.packed, self.around, self.axis, self.dim, self.zigzag = packed, around, axis, dim, zigzag
        self.line = axis.watch and axis.watch.here()
        self.consumers = 0
        self.waiting = 0
        self.full: Tensor | None = None

    def saved(self) -> None:
        self.consumers += 1
        self.waiting += 1

    def take(self) -> Tensor:
        full = self._regather() if self.full is None else self.full
        self.waiting -= 1
        self.full = full if self.waiting else None
        self.waiting = self.waiting or self.consumers  # a second backward through a retained graph
        return full

    def _regather(self) -> Tensor:
        full = gather(self.around.unpack(self.packed), self.axis, self.dim, self.zigzag)
        if self.axis.watch is not None:
            self.axis.watch.coerced(full, self.axis, self.line, "result in backward")
        return full


class _View(NamedTuple):
    """A gathered tensor, or a view of it, as autograd saves it."""

    of: _Gathered
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@contextmanager
def regather(x: Tensor, axis: Axis, dim: int, zigzag: bool = False) -> Generator[Tensor]:
    """S(dim) → R as `all_gather`, but what autograd saves of it inside the block is only x.

    Backward gathers a second time, when the first consumer needs it, and frees after the last.
    """
    full = all_gather(x, axis, dim, zigzag)
    if axis.size == 1:
        yield full
        return
    storage, around = full.untyped_storage().data_ptr(), Around()
    gathered = _Gathered(around.pack(x.detach()), around, axis, dim, zigzag)

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != storage:
            return around.pack(saved)
        gathered.saved()
        return _View(gathered, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if not (isinstance(packed, _View) and packed.of is gathered):
            return around.unpack(packed)
        return gathered.take().as_strided(packed.shape, packed.stride, packed.offset)

    with saved_tensors_hooks(pack, unpack):
        yield full
