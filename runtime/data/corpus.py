"""A plan's data: files of text or of token ids, in one set or in several."""

from dataclasses import dataclass

import torch

from ..errors import RunError, counted
from .files import find_files, require_own_format, split_files
from .mixture import Mixture, Part, Stream
from .samples import Windows


@dataclass(frozen=True)
class DataSet:
    """Files of a mixture: glob patterns, or `python_stdlib`; its weight beside other sets; the
    share for validation.
    """

    name: str
    files: tuple[str, ...]
    weight: float = 1.0
    holdout: float = 0.0


@dataclass(frozen=True)
class Text(Windows):
    """Files of text, a token a byte: glob patterns, or `python_stdlib`; a share `holdout` is left
    for validation.

    In place of files there may be sets of them.
    """

    files: tuple[str, ...] = ()
    holdout: float = 0.05
    sets: tuple[DataSet, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The element type of a byte."""
        return torch.uint8


@dataclass(frozen=True)
class Tokens(Windows):
    """Files, as for `Text`, of nothing but token ids of one integer dtype."""

    files: tuple[str, ...] = ()
    dtype: torch.dtype = torch.uint16
    holdout: float = 0.05
    sets: tuple[DataSet, ...] = ()


Corpus = Text | Tokens


def opened(
    corpus: Corpus, files: tuple[str, ...], seq: int, looks: bool = True
) -> tuple[Mixture, Mixture | None]:
    """The data for training and, if some is held out, for validation; `files`, if any, in place of
    the corpus' sets.

    RunError where there is too little, or where files to validate with are trained on; where this
    rank `looks`, also where one of them is of another format.
    """
    sets = corpus.sets
    if files or not sets:
        sets = (DataSet("", files or corpus.files, 1.0, corpus.holdout),)
    found = {each: find_files(each.files) for each in sets}
    if looks and not corpus.as_is:
        for paths in found.values():
            require_own_format(paths, corpus.dtype)
    shares = [
        _Share.of(each, paths, corpus.dtype, corpus.width(seq)) for each, paths in found.items()
    ]
    _require_apart(shares)
    held = [share.held for share in shares if share.held]
    return Mixture([share.trained for share in shares]), Mixture(held) if held else None


@dataclass(frozen=True)
class _Share:
    """The parts of a set: what is trained on, and what is held out, if anything is."""

    trained: Part
    held: Part | None

    @classmethod
    def of(cls, data_set: DataSet, paths: list[str], dtype: torch.dtype, width: int) -> "_Share":
        """Whole files are held out where there are several; of a single file its last windows.

        RunError.
        """
        try:
            if len(paths) > 1 or data_set.holdout == 0:
                trained, held = split_files(paths, data_set.holdout)
                streams = (
                    Stream(trained, dtype, width),
                    Stream(held, dtype, width) if held else None,
                )
            else:
                streams = Stream(paths, dtype, width).split(data_set.holdout)
        except RunError as error:
            if not data_set.name:
                raise
            raise RunError(f"set {data_set.name}: {error}") from None
        first, last = streams
        held_part = Part(data_set.name, last, data_set.weight) if last else None
        return cls(Part(data_set.name, first, data_set.weight), held_part)


def _require_apart(shares: list[_Share]) -> None:
    """RunError where a window that one set validates with is one that another trains on."""
    for share in shares:
        for other in shares:
            if (
                share is not other
                and share.held
                and (path := share.held.stream.shared(other.trained.stream))
            ):
                raise RunError(
                    f"{path} is held out of the set {share.trained.name} and trained on in"
                    f" {other.trained.name}: with `holdout = 0` in both, or in patterns that"
                    " do not overlap, it is not"
                )


def too_few(mixture: Mixture, global_batch: int) -> str:
    """The problem of sets of which a batch takes more than there is; empty if there are none."""
    return "; ".join(
        f"{f'{part.name}: ' if part.name else ''}{part.stream.tokens:,} tokens make"
        f" {part.stream.windows:,}"
        f" sequences of {part.stream.width:,}, fewer than the"
        f" {round(share * part.stream.windows):,} of a global batch"
        for part, share in zip(mixture.parts, mixture.passes(global_batch), strict=True)
        if share > 1
    )


def held_out(validation: Mixture | None) -> list[str]:
    """A line for each set of a single file, whose last windows are held out."""
    if validation is None:
        return []
    return [
        f"validation: the last {counted(part.stream.windows, 'sequence')} of"
        f" {part.stream.files[0]},"
        f" of {part.stream.first + part.stream.windows:,}; training never sees them"
        for part in validation.parts
        if part.stream.is_split
    ]


def repeated(mixture: Mixture, steps: int, global_batch: int) -> list[str]:
    """A line for each set that the steps see more than once."""
    return [
        f"{part.name or 'the data'} is seen {times:.1f} times in {counted(steps, 'step')}"
        for part, times in zip(mixture.parts, mixture.passes(steps * global_batch), strict=True)
        if times > 1
    ]
