"""Windows of tokens compared between ranks, while the next batch is made: a damaged copy of the
data is found.

Ranks that differ only on axes that do not split `batch` read the same windows: each compares all of
its own.  Where nodes may have their own copies of the files, some ranks also read the windows of a
rank of the node before and compare these.  So every window that trains anything has been read on
two nodes.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..comm import c10d
from ..comm.mesh import Mesh
from ..comm.witness import Witness, rank_of_previous_node

EVERY = 8
"""Steps between comparisons of a small job, after the first steps, each of which is compared."""

_FIRST_STEPS = 4
# for each so many ranks comparisons are one step further apart: all go through one store
_RANKS = 256


class WindowCheck:
    """This rank's side of the comparison."""

    def __init__(
        self,
        name: str,
        window: Callable[[int], Tensor],
        samples: Callable[[int, int], list[int]],
        mesh: Mesh,
        axes: Sequence[str],
        every: int,
        end: int,
        store: Any,
    ) -> None:
        """`window` gives the window of a sample, `samples` the samples of a step on a rank of
        `axes`, which split `batch`.

        Windows are compared every `every` steps, and in the last step below `end`.
        """
        self._name, self._window, self._samples = name, window, samples
        self._every, self._end = max(every, c10d.place()[1] // _RANKS), end
        self._witness = Witness(store)
        self._row = mesh.rank(*axes)
        self._other_row = _row_of_previous_node(mesh, axes)
        self._keys: Tensor | None = None
        self._seen: dict[int, dict[str, int]] = {self._row: {}}
        if self._other_row is not None:
            self._seen[self._other_row] = {}
        self._first_step = self._last_step = -1

    def fault(self, step: int, windows: Tensor) -> tuple[int, str] | None:
        """A sample whose window another rank has read otherwise, and the two ranks; `windows` are
        this rank's.

        A step that is run once more is not compared once more.
        """
        if step <= self._last_step:
            return None
        if self._first_step < 0:
            self._first_step = step
        self._last_step = step
        self._see(self._row, self._samples(step, self._row), windows)
        if self._other_row is not None:
            others = self._samples(step, self._other_row)
            self._see(
                self._other_row, others, torch.stack([self._window(sample) for sample in others])
            )
        if not self._is_due(step):
            return None
        return self._compare(step)

    def _see(self, row: int, samples: list[int], windows: Tensor) -> None:
        if self._keys is None:
            self._keys = _keys(windows.shape[1])
        self._seen[row] |= zip(map(str, samples), _hashes(windows, self._keys), strict=True)

    def _is_due(self, step: int) -> bool:
        is_early = step < self._first_step + _FIRST_STEPS
        return is_early or step % self._every == 0 or step == self._end - 1

    def _compare(self, step: int) -> tuple[int, str] | None:
        for row, seen in self._seen.items():
            difference = self._witness.difference(f"{self._name}/{step}/{row}", seen)
            if difference is not None:
                return int(difference.name), difference.ranks
            seen.clear()
        return None


def _keys(length: int) -> Tensor:
    """An odd random key for each token of a window, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (length,), generator=generator) | 1


def _hashes(windows: Tensor, keys: Tensor) -> list[int]:
    """A hash of each row: the sum of its tokens, each times its key, mod 2^64.

    One token that differs always changes it; several do not with probability 2^-32 at most, as
    `debug.compare` says.
    """
    return cast(Any, (windows * keys).sum(1)).tolist()


def _row_of_previous_node(mesh: Mesh, axes: Sequence[str]) -> int | None:
    """The place on `axes` whose windows this rank reads besides its own; None where there is
    nothing to read.

    The first of the ranks that read the same windows does so for all.
    """
    other = rank_of_previous_node()
    other_axes = [name for name in mesh.axes if name not in axes]
    if other is None or mesh.rank(*other_axes) > 0:
        return None
    row = mesh.rank_of(other, *axes)
    if row == mesh.rank(*axes):
        return None
    return row
