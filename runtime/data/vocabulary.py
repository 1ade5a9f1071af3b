"""Token ids are within the plan's vocabulary: looked at before the first step, in all of the data
or in a sample of it.

An id that the sample leaves out is found by the step that would train on it (`loader`), with the
same words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ..errors import RunError
from .mixture import Mixture, Stream

PIECE = 1 << 20
"""Tokens that are read at once."""

MOST = 512
"""Pieces that all ranks together read: 1 GiB of 16-bit ids, some seconds of a disk."""


@dataclass(frozen=True)
class _Piece:
    """A stretch of a file of a stream."""

    stream: Stream
    file: int
    start: int
    stop: int


def check_ids(mixtures: Sequence[Mixture], vocab: int, rank: int, ranks: int) -> None:
    """RunError where a piece of the data that is this rank's to look at has an id beyond the
    vocabulary.
    """
    pieces = [*_pieces(mixtures, vocab)]
    count = min(len(pieces), MOST)
    # spread evenly over all pieces
    numbers = [number * (len(pieces) - 1) // max(1, count - 1) for number in range(count)]
    for number in numbers[rank::ranks]:
        piece = pieces[number]
        tokens = piece.stream.read(piece.file, piece.start, piece.stop)
        if cell := find_beyond(tokens[None], vocab):
            where = piece.stream.place(piece.file, piece.start + cell[1])
            raise vocabulary_error(where, int(tokens[cell[1]]), vocab)


def _pieces(mixtures: Sequence[Mixture], vocab: int) -> Iterator[_Piece]:
    """The pieces of all files whose ids can be beyond the vocabulary, each file once."""
    seen = set[str]()
    for part in chain.from_iterable(mixture.parts for mixture in mixtures):
        stream = part.stream
        if vocab > torch.iinfo(stream.dtype).max:
            continue
        for number, (path, length) in enumerate(zip(stream.files, stream.lengths, strict=True)):
            if path not in seen:
                seen.add(path)
                for start in range(0, length, PIECE):
                    yield _Piece(stream, number, start, min(start + PIECE, length))


def vocabulary_error(where: str, token: int, vocab: int) -> RunError:
    """The error of an id at a place."""
    return RunError(
        f"{where} has token id {token:,}, and the plan's vocab is {vocab:,}",
        "were the files made with another tokenizer, or with another `dtype`?",
        "if not, the model's `vocab` has to be larger than the largest id",
    )


def find_beyond(windows: Tensor, vocab: int) -> tuple[int, int] | None:
    """The row and the column of the first id of some windows that is beyond the vocabulary."""
    outside = ((windows < 0) | (windows >= vocab)).nonzero()
    if not len(outside):
        return None
    return int(outside[0][0]), int(outside[0][1])
