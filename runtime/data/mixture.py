"""Windows of tokens: of one stream of files, and of several sets of files by their weights."""

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import RunError, count_with_noun, quote_first_names
from .files import TokenFiles
from .order import Interleaving, hash_of, permute, whole_weights
from .samples import Marks


class Stream:
    """Token files one after another, cut into windows of `width` tokens that do not overlap.

    RunError if they make less than one, or a file ends within a token.
    """

    def __init__(self, files: list[str], dtype: torch.dtype, width: int) -> None:
        self.files, self._tokens = tuple(files), TokenFiles(files, dtype)
        self._starts = list(accumulate(self._tokens.lengths, initial=0))
        self.width, self.first, self.is_split = width, 0, False
        self.windows = self._starts[-1] // width
        self._beyond = self._starts[-1] - self.windows * width  # tokens after the last window
        if self.windows == 0:
            raise RunError(
                f"too little data: {count_with_noun(self.tokens, 'token')} in"
                f" {count_with_noun(len(files), 'file')}"
                f" are less than a window of {width}"
            )

    @property
    def read_files(self) -> tuple[str, ...]:
        """All files that it reads."""
        return self.files

    @property
    def tokens(self) -> int:
        """The tokens of its windows, and the tokens after the last window."""
        return self.windows * self.width + self._beyond

    def split(self, share: float) -> tuple["Stream", "Stream"]:
        """Two streams: the first windows, and the last, about `share` of all and at least one.

        RunError where it has only one window.
        """
        if self.windows < 2:
            raise RunError(
                f"too little data to hold a part of it out: {quote_first_names(self.files)} makes"
                f" one window of {count_with_noun(self.width, 'token')};"
                " write `holdout = 0`, or name more files"
            )
        held_out = min(max(1, round(share * self.windows)), self.windows - 1)
        before, last = copy(self), copy(self)
        before.is_split = last.is_split = True
        before.windows, before._beyond = self.windows - held_out, 0
        last.first, last.windows = self.first + before.windows, held_out
        return before, last

    def find_shared_file(self, other: "Stream") -> str:
        """A file that both have windows of; "" if there is none, or if the two are different
        windows of the same files.
        """
        is_alike = self.files == other.files and self.width == other.width
        if is_alike and (
            self.first >= other.first + other.windows or other.first >= self.first + self.windows
        ):
            return ""
        theirs = {*other.files}
        return next((path for path in self.files if path in theirs), "")

    def window(self, number: int) -> Tensor:
        """Window `number` < `windows`: [width], int64.  RunError if a file has changed."""
        pieces = [self.read(*stretch) for stretch in self.stretches(number)]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces)

    def marks(self, number: int) -> Marks | None:
        """The marks of a window, if its files have any.  RunError if a file has changed."""
        return None

    def place_of_window(self, number: int) -> str:
        """Where a window lies, for instance `a.txt, tokens 340 to 356`, the last not included."""
        places = list[str]()
        for file, start, stop in self.stretches(number):
            places.append(f"{self.files[file]}, tokens {start:,} to {stop:,}")
        return " and ".join(places)

    def stretches(self, number: int) -> list[tuple[int, int, int]]:
        """The files of a window by number, each with the first of its tokens and the one after
        the last.
        """
        start = (self.first + number) * self.width
        stop = start + self.width
        index = bisect_right(self._starts, start) - 1
        stretches = list[tuple[int, int, int]]()
        while start < stop:
            first, end = self._starts[index], min(stop, self._starts[index + 1])
            stretches.append((index, start - first, end - first))
            start, index = end, index + 1
        return stretches

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tokens in the files."""
        return self._tokens.dtype

    @property
    def lengths(self) -> list[int]:
        """The tokens of each file."""
        return self._tokens.lengths

    def read(self, file: int, start: int, stop: int) -> Tensor:
        """Tokens start to stop of a file: [stop - start], int64.  RunError."""
        return self._tokens.read(file, start, stop).long()

    def place(self, file: int, number: int) -> str:
        """A token of a file, in words."""
        return f"{self.files[file]}: token {number:,}, at byte {number * self.dtype.itemsize:,},"

    def place_of_token(self, number: int) -> str:
        """A token of its windows, in words."""
        number += self.first * self.width
        file = bisect_right(self._starts, number) - 1
        return self.place(file, number - self._starts[file])


@dataclass(frozen=True)
class Part:
    """A set of a mixture: its name, "" of a set alone, its windows and its weight."""

    name: str
    stream: Stream
    weight: float = 1.0


class Mixture:
    """Sets dealt out by their weights, each reshuffled in each of its passes: sample n is a
    function of (seed, n).
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._weights = whole_weights([part.weight for part in parts])
        self._turns = Interleaving(self._weights)

    def window(self, sample: int, seed: int) -> Tensor:
        """The window of a sample: [width], int64.  RunError if a file has changed."""
        stream, number = self._window_of(sample, seed)
        return stream.window(number)

    def marks(self, sample: int, seed: int) -> Marks | None:
        """The marks of a sample, if its files have any.  RunError if a file has changed."""
        stream, number = self._window_of(sample, seed)
        return stream.marks(number)

    def place_of_window(self, sample: int, seed: int) -> str:
        """The files and tokens of a sample's window, in words."""
        stream, number = self._window_of(sample, seed)
        return stream.place_of_window(number)

    def place(self, sample: int, seed: int, column: int) -> str:
        """The file and the place in it of a token of a sample, in words."""
        stream, number = self._window_of(sample, seed)
        return stream.place_of_token(number * stream.width + column)

    def _window_of(self, sample: int, seed: int) -> tuple[Stream, int]:
        """The stream of a sample, and the number of its window."""
        which, number = self._turns.at(sample, seed)
        name, stream = self.parts[which].name, self.parts[which].stream
        epoch, position = divmod(number, stream.windows)
        key = hash_of(seed, epoch, name) if name else hash_of(seed, epoch)
        return stream, permute(position, stream.windows, key)

    def passes(self, samples: int) -> list[float]:
        """How often each set is seen in the first samples."""
        total = sum(self._weights)
        passes = list[float]()
        for part, weight in zip(self.parts, self._weights, strict=True):
            passes.append(samples * weight / total / part.stream.windows)
        return passes

    @property
    def samples(self) -> int:
        """How many samples there are until one of the sets has been seen once."""
        total = sum(self._weights)
        ends = list[Fraction]()
        for part, weight in zip(self.parts, self._weights, strict=True):
            ends.append(Fraction(part.stream.windows * total, weight))
        return int(min(ends))
