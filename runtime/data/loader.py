"""Batches: the samples of each step, and who gets them.

Each rank reads only the rows that are its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..comm.positions import Positions
from ..errors import RunError
from ..ops.dropout import draws_of
from .mixture import Mixture
from .samples import Marks, Windows
from .vocabulary import find_beyond, vocabulary_error
from .window_check import WindowCheck


@dataclass(frozen=True)
class Input:
    """How a rank holds an input of a microbatch: its dims, `batch` and perhaps `seq`, and the axes
    that split each.

    Axes in `zigzag` split `seq` as `Positions` says.
    """

    dims: tuple[str, ...]
    split: Mapping[str, tuple[str, ...]]
    zigzag: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batch:
    """This rank's part of a step's inputs, int64, [microbatches, …], each in its own layout.

    Documents and draws are None where the model does not take them.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None
    draws: Tensor | None = None

    def __len__(self) -> int:
        """The number of microbatches."""
        return len(self.tokens)

    def microbatches(self) -> Iterator[tuple[Tensor, ...]]:
        """The inputs of each microbatch, in this order."""
        inputs = (self.tokens, self.labels, self.documents, self.draws)
        taken = [values for values in inputs if values is not None]
        return zip(*(values.unbind() for values in taken), strict=True)

    def to(self, device: torch.device) -> "Batch":
        """This batch on a device.  A copy from pinned memory is not waited for."""
        moved = dict[str, Tensor]()
        for field in fields(self):
            part: Tensor | None = getattr(self, field.name)
            if part is not None:
                moved[field.name] = part.to(device, non_blocking=True)
        return Batch(**moved)


class Loader:
    """Deals out a mixture's windows: step and row of a batch make sample number step · global_batch
    + row.

    Row m · (D · b) + r · b + j is row j of microbatch m on data-parallel rank r of D.  vocab bounds
    the token ids; `sampling` says how windows become samples.
    """

    def __init__(
        self,
        data: Mixture,
        sampling: Windows,
        inputs: Mapping[str, Input],
        mesh: Mesh,
        global_batch: int,
        microbatches: int,
        vocab: int,
        seed: int,
    ) -> None:
        self._data, self._sampling, self._inputs, self._mesh = data, sampling, inputs, mesh
        self._global_batch, self._microbatches = global_batch, microbatches
        self._vocab, self._seed = vocab, seed
        axes = inputs["tokens"].split.get("batch", ())
        assert all(axes == layout.split.get("batch", ()) for layout in inputs.values()), (
            "loader: inputs differ in rows"
        )
        self._ranks, self._rank = mesh.size(*axes), mesh.rank(*axes)
        self._axes = axes
        self._check: WindowCheck | None = None
        self._rows = global_batch // (microbatches * self._ranks)
        assert self._rows * microbatches * self._ranks == global_batch, (
            "loader: global_batch is not divisible"
        )

    def compare_windows(self, name: str, every: int, end: int, store: Any) -> None:
        """From now on compares the windows of steps below `end` with other ranks' windows, as
        `WindowCheck` says.

        `store` belongs to the thread that asks for batches.
        """
        self._check = WindowCheck(
            name, self._compared, self.samples, self._mesh, self._axes, every, end, store
        )

    def batch(self, step: int) -> Batch:
        """This rank's rows of step `step` (from 0), on its device.  RunError as below."""
        return self.make_host_batch(step).to(self._mesh.device)

    def make_host_batch(self, step: int) -> Batch:
        """This rank's rows of step `step` in the host's memory, pinned where the device is a GPU.

        RunError if a token id is not below vocab, a file has changed, or other ranks read other
        tokens.
        """
        samples = self.samples(step, self._rank)
        windows = torch.stack([self._data.window(sample, self._seed) for sample in samples])
        marks = self._marks(samples)
        compared = windows if marks is None else marks.with_tokens(windows)
        if self._check is not None and (fault := self._check.fault(step, compared)):
            sample, ranks = fault
            place = self._data.place_of_window(sample, self._seed)
            raise RunError(
                f"step {step + 1}: the data differs between {ranks}, in sample {sample}: {place}",
                "one copy of the file is damaged or another version: give all nodes the same,"
                " then --resume auto",
            )
        if cell := find_beyond(windows, self._vocab):
            where = self._data.place(samples[cell[0]], self._seed, cell[1])
            raise vocabulary_error(where, int(windows[cell]), self._vocab)
        inputs = self._sampling.make_inputs(windows, samples, self._vocab, self._seed, marks)
        inputs["draws"] = draws_of(samples, self._seed)
        parts = {name: self._local(inputs[name], layout) for name, layout in self._inputs.items()}
        return Batch(**parts)

    @property
    def batches(self) -> int:
        """How many batches one pass over the data makes; the last may run into the next pass."""
        return -(-self._data.samples // self._global_batch)

    def samples(self, step: int, rank: int) -> list[int]:
        """The samples of a step on a data-parallel rank, microbatch by microbatch."""
        first = step * self._global_batch
        samples = list[int]()
        for microbatch in range(self._microbatches):
            start = first + (microbatch * self._ranks + rank) * self._rows
            samples += range(start, start + self._rows)
        return samples

    def _marks(self, samples: list[int]) -> Marks | None:
        """The marks of samples.  RunError where one of several sets has none."""
        rows = [self._data.marks(sample, self._seed) for sample in samples]
        marks = [row for row in rows if row is not None]
        assert len(marks) in (0, len(rows)), "loader: marks of some samples alone"
        return Marks.stack(marks) if marks else None

    def _compared(self, sample: int) -> Tensor:
        """The window of a sample as ranks compare it."""
        window, marks = (
            self._data.window(sample, self._seed),
            self._data.marks(sample, self._seed),
        )
        return window if marks is None else marks.with_tokens(window)

    def _local(self, rows: Tensor, layout: Input) -> Tensor:
        """[microbatches, b, seq], or without seq, in the layout of an input."""
        rows = rows.reshape(self._microbatches, self._rows, *rows.shape[1:])
        if "seq" in layout.dims:
            axes = layout.split.get("seq", ())
            positions = Positions(self._mesh, rows.shape[-1], *axes, zigzag=layout.zigzag)
            rows = torch.cat([rows.narrow(-1, *run) for run in positions.chunks], -1)
            rows = rows.movedim(-1, 1 + layout.dims.index("seq")).contiguous()
        if self._mesh.device.type == "cuda":
            return rows.pin_memory()
        return rows
