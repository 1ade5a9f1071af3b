"""Windows of tokens: of one stream of files, and of several sets of files by their weights."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import RunError, counted
from .files import TokenFiles
from .order import Interleaving, drawn, shuffled, whole_weights


class Stream:
    """Token files one after another, cut into windows of `width` tokens that do not overlap.

    RunError if they make less than one, or a file ends within a token.
    """

    def __init__(self, files: list[str], dtype: torch.dtype, width: int) -> None:
        self.files, self._tokens = tuple(files), TokenFiles(files, dtype)
        self._starts = list(accumulate(self._tokens.lengths, initial=0))
        self.width, self.tokens = width, self._starts[-1]
        self.windows = self.tokens // width
        if self.windows == 0:
            raise RunError(
                f"too little data: {counted(self.tokens, 'token')} in {counted(len(files), 'file')}"
                f" are less than a window of {width}"
            )

    def window(self, number: int) -> Tensor:
        """Window `number` < `windows`: [width], int64.  RunError if a file has changed."""
        return torch.cat([self._tokens.read(*stretch).long() for stretch in self._stretches(number)])

    def place(self, number: int) -> str:
        """For instance `a.txt, tokens 340 to 356`, the last not included."""
        stretches = self._stretches(number)
        return " and ".join(f"{self.files[file]}, tokens {start:,} to {stop:,}" for file, start, stop in stretches)

    def _stretches(self, number: int) -> list[tuple[int, int, int]]:
        """The files of a window by number, each with the first of its tokens and the one after the last."""
        start = number * self.width
        stop = start + self.width
        index = bisect_right(self._starts, start) - 1
        stretches = list[tuple[int, int, int]]()
        while start < stop:
            first, end = self._starts[index], min(stop, self._starts[index + 1])
            stretches.append((index, start - first, end - first))
            start, index = end, index + 1
        return stretches


@dataclass(frozen=True)
class Part:
    """A set of a mixture: its name, "" of a set alone, its windows and its weight."""

    name: str
    stream: Stream
    weight: float = 1.0


class Mixture:
    """Sets dealt out by their weights, each reshuffled in each of its passes: sample n is a function of (seed, n)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._weights = whole_weights([part.weight for part in parts])
        self._turns = Interleaving(self._weights)

    def window(self, sample: int, seed: int) -> Tensor:
        """The window of a sample: [width], int64.  RunError if a file has changed."""
        stream, number = self._place(sample, seed)
        return stream.window(number)

    def place(self, sample: int, seed: int) -> str:
        """The files and tokens of a sample's window, in words."""
        stream, number = self._place(sample, seed)
        return stream.place(number)

    def _place(self, sample: int, seed: int) -> tuple[Stream, int]:
        """The stream that has the window of a sample, and the window's number there."""
        which, number = self._turns.at(sample, seed)
        name, stream = self.parts[which].name, self.parts[which].stream
        epoch, position = divmod(number, stream.windows)
        key = drawn(seed, epoch, name) if name else drawn(seed, epoch)
        return stream, shuffled(position, stream.windows, key)

    def passes(self, samples: int) -> list[float]:
        """How often each set is seen in the first samples."""
        shares = (samples * weight / sum(self._weights) for weight in self._weights)
        return [share / part.stream.windows for share, part in zip(shares, self.parts, strict=True)]

    @property
    def samples(self) -> int:
        """How many samples there are until one of the sets is through."""
        whole = sum(self._weights)
        ends = (
            Fraction(part.stream.windows * whole, weight)
            for part, weight in zip(self.parts, self._weights, strict=True)
        )
        return int(min(ends))
