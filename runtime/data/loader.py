"""Training data: files as one stream of tokens, cut into sequences and shuffled by the seed alone.

Each rank reads only the rows that are its own, straight from the mapped files.
"""

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from itertools import accumulate

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..comm.positions import Positions
from ..errors import RunError, counted
from ..ops.dropout import draws_of
from .samples import Windows

_BITS = 64
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True)
class Text(Windows):
    """Files of text, a token a byte: glob patterns, or `python_stdlib`; a share `holdout` is left for validation."""

    files: tuple[str, ...]
    holdout: float = 0.05

    @property
    def dtype(self) -> torch.dtype:
        """The element type of a byte."""
        return torch.uint8


@dataclass(frozen=True)
class Tokens(Windows):
    """Files, as for `Text`, of nothing but token ids of one integer dtype."""

    files: tuple[str, ...]
    dtype: torch.dtype = torch.uint16
    holdout: float = 0.05


Corpus = Text | Tokens


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that the patterns match, sorted, without empty ones.  RunError if a pattern matches none."""
    found: set[str] = set()
    for pattern in patterns:
        matches = _standard_library() if pattern == "python_stdlib" else glob(pattern, recursive=True)
        files = {path for path in matches if os.path.isfile(path) and os.path.getsize(path) > 0}
        if not files:
            place = "" if os.path.isabs(pattern) else f", looked for in {os.getcwd()}"
            raise RunError(f"no data: `{pattern}` matches no file that holds anything{place}")
        found |= files
    return sorted(found)


def _standard_library() -> list[str]:
    """The sources of this interpreter's standard library, without installed packages and tests."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found: list[str] = []
    for folder, below, files in os.walk(sysconfig.get_path("stdlib")):
        below[:] = [name for name in below if name not in skip]  # not entered: installed packages can be vast
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return found


def split_files(files: list[str], holdout: float) -> tuple[list[str], list[str]]:
    """(training files, validation files), chosen by a hash of each path below the files' common folder.

    At least one file is held out, if there are two and holdout is not 0.
    """
    if len(files) < 2 or holdout == 0:
        return files, []
    root = os.path.commonpath(files)
    shuffled = sorted(files, key=lambda path: hashlib.sha256(os.path.relpath(path, root).encode()).digest())
    held = set(shuffled[: max(1, round(holdout * len(files)))])
    return [path for path in files if path not in held], sorted(held)


class Stream:
    """Token files one after another, mapped into memory, cut into windows of `width` tokens that do not overlap.

    RunError if they make less than one, or a file ends within a token.
    """

    def __init__(self, files: list[str], dtype: torch.dtype, width: int) -> None:
        self._parts = [_mapped(path, dtype) for path in files]
        self._starts = list(accumulate((len(part) for part in self._parts), initial=0))
        self._width, self.tokens = width, self._starts[-1]
        self.windows = self.tokens // width
        if self.windows == 0:
            raise RunError(
                f"too little data: {counted(self.tokens, 'token')} in {counted(len(files), 'file')}"
                f" are less than a window of {width}"
            )

    def window(self, number: int) -> Tensor:
        """Window `number` < `windows`: [width], int64."""
        start = number * self._width
        stop = start + self._width
        index = bisect_right(self._starts, start) - 1
        pieces: list[Tensor] = []
        while start < stop:
            piece = self._parts[index][start - self._starts[index] : stop - self._starts[index]]
            pieces.append(piece.long())
            start += len(piece)
            index += 1
        return torch.cat(pieces)


def _mapped(path: str, dtype: torch.dtype) -> Tensor:
    size, width = os.path.getsize(path), dtype.itemsize
    if size % width:
        name = str(dtype).removeprefix("torch.")
        raise RunError(f"{path} has {size:,} bytes, which are no whole number of tokens: one of {name} has {width}")
    return torch.from_file(path, shared=False, size=size // width, dtype=dtype)


def shuffled(position: int, windows: int, key: int) -> int:
    """Where `position` < `windows` goes under the permutation of this key: a Feistel cipher that walks its cycles.

    (Black and Rogaway, CT-RSA 2002.)  No table is needed, whatever the number of windows.
    """
    half = max(1, ((windows - 1).bit_length() + 1) // 2)
    while True:
        position = _feistel(position, half, key)
        if position < windows:
            return position


def _feistel(value: int, half: int, key: int) -> int:
    """A permutation of the numbers of 2 · half bits."""
    left, right = value >> half, value & ((1 << half) - 1)
    for round_ in range(4):
        mixed = _mix(_mix(key + round_) ^ right) & ((1 << half) - 1)
        left, right = right, left ^ mixed
    return left << half | right


def _mix(z: int) -> int:
    """The finaliser of splitmix64 on a Python int."""
    z &= _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


@dataclass(frozen=True)
class Input:
    """How a rank holds an input of a microbatch: its dims, of `batch` and `seq`, and the axes that split each.

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
        return zip(*(each.unbind() for each in inputs if each is not None), strict=True)


class Loader:
    """Deals out a stream's windows: sample number step · global_batch + row, reshuffled in each pass over the data.

    Row m · (D · b) + r · b + j is row j of microbatch m on data-parallel rank r of D.  vocab bounds the token ids;
    `made` says what becomes of a window.
    """

    def __init__(
        self,
        stream: Stream,
        made: Windows,
        inputs: Mapping[str, Input],
        mesh: Mesh,
        global_batch: int,
        microbatches: int,
        vocab: int,
        seed: int,
    ) -> None:
        self._stream, self._made, self._inputs, self._mesh = stream, made, inputs, mesh
        self._global_batch, self._microbatches = global_batch, microbatches
        self._vocab, self._seed = vocab, seed
        axes = inputs["tokens"].split.get("batch", ())
        assert all(axes == each.split.get("batch", ()) for each in inputs.values()), "loader: inputs differ in rows"
        self._ranks, self._rank = mesh.size(*axes), mesh.rank(*axes)
        self._rows = global_batch // (microbatches * self._ranks)
        assert self._rows * microbatches * self._ranks == global_batch, "loader: global_batch is not divisible"

    def batch(self, step: int) -> Batch:
        """This rank's rows of step `step` (from 0).  RunError if a token id is not below vocab."""
        samples = [step * self._global_batch + row for row in self._own_rows()]
        windows = torch.stack([self._window(sample) for sample in samples])
        if int(windows.max()) >= self._vocab or int(windows.min()) < 0:
            ids = f"{int(windows.min())} to {int(windows.max())}"
            raise RunError(f"the data holds token ids {ids}, and the plan's vocab is {self._vocab}")
        given = self._made.given(windows, samples, self._vocab, self._seed)
        given["draws"] = draws_of(samples, self._seed)
        return Batch(**{name: self._local(given[name], layout) for name, layout in self._inputs.items()})

    @property
    def batches(self) -> int:
        """How many batches one pass over the data makes; the last may run into the next pass."""
        return -(-self._stream.windows // self._global_batch)

    def _own_rows(self) -> list[int]:
        """This rank's rows of the global batch, microbatch by microbatch."""
        starts = [(m * self._ranks + self._rank) * self._rows for m in range(self._microbatches)]
        return [start + row for start in starts for row in range(self._rows)]

    def _window(self, sample: int) -> Tensor:
        epoch, position = divmod(sample, self._stream.windows)
        digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
        return self._stream.window(shuffled(position, self._stream.windows, int.from_bytes(digest[:8], "big")))

    def _local(self, rows: Tensor, layout: Input) -> Tensor:
        """[microbatches, b, seq], or without seq, in the layout of an input, on the device."""
        rows = rows.reshape(self._microbatches, self._rows, *rows.shape[1:])
        if "seq" in layout.dims:
            axes = layout.split.get("seq", ())
            positions = Positions(self._mesh, rows.shape[-1], *axes, zigzag=layout.zigzag)
            rows = torch.cat([rows.narrow(-1, *run) for run in positions.chunks], -1)
            rows = rows.movedim(-1, 1 + layout.dims.index("seq")).contiguous()
        if self._mesh.device.type == "cuda":
            rows = rows.pin_memory()
        return rows.to(self._mesh.device, non_blocking=True)
