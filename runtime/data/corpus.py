"""A plan's data: files of text or of token ids, in one set or in several."""

from dataclasses import dataclass

import torch

from ..errors import RunError, counted
from .files import find_files, split_files
from .mixture import Mixture, Part, Stream
from .samples import Windows


@dataclass(frozen=True)
class DataSet:
    """Files of a mixture: glob patterns, or `python_stdlib`; its weight beside other sets; the share for validation."""

    name: str
    files: tuple[str, ...]
    weight: float = 1.0
    holdout: float = 0.0


@dataclass(frozen=True)
class Text(Windows):
    """Files of text, a token a byte: glob patterns, or `python_stdlib`; a share `holdout` is left for validation.

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


def opened(corpus: Corpus, files: tuple[str, ...], seq: int) -> tuple[Mixture, Mixture | None]:
    """The data for training and, if some is held out, for validation; `files`, if any, in place of the corpus' sets.

    RunError where there is too little, or where files to validate with are trained on.
    """
    sets = corpus.sets if corpus.sets and not files else (DataSet("", files or corpus.files, 1.0, corpus.holdout),)
    split = {each: split_files(find_files(each.files), each.holdout) for each in sets}
    trained = {path: each.name for each, (paths, _) in split.items() for path in paths}
    for each, (_, held) in split.items():
        if both := [path for path in held if path in trained]:
            raise RunError(
                f"{both[0]} is held out of the set {each.name} and trained on in {trained[both[0]]}: with `holdout = 0`"
                " in both, or in patterns that do not overlap, it is not"
            )
    width = corpus.width(seq)
    parts = [[_part(each, paths, corpus.dtype, width) for each, paths in _of(split, which)] for which in (0, 1)]
    return Mixture(parts[0]), Mixture(parts[1]) if parts[1] else None


def _of(split: dict[DataSet, tuple[list[str], list[str]]], which: int) -> list[tuple[DataSet, list[str]]]:
    return [(each, paths[which]) for each, paths in split.items() if paths[which]]


def _part(each: DataSet, paths: list[str], dtype: torch.dtype, width: int) -> Part:
    try:
        return Part(each.name, Stream(paths, dtype, width), each.weight)
    except RunError as error:
        if not each.name:
            raise
        raise RunError(f"set {each.name}: {error}") from None


def too_few(mixture: Mixture, global_batch: int) -> str:
    """The problem of sets of which a batch takes more than there is; empty if there are none."""
    return "; ".join(
        f"{f'{part.name}: ' if part.name else ''}{part.stream.tokens:,} tokens make {part.stream.windows:,}"
        f" sequences of {part.stream.width:,}, fewer than the {round(share * part.stream.windows):,} of a global batch"
        for part, share in zip(mixture.parts, mixture.passes(global_batch), strict=True)
        if share > 1
    )


def repeated(mixture: Mixture, steps: int, global_batch: int) -> list[str]:
    """A line for each set that the steps see more than once."""
    return [
        f"{part.name or 'the data'} is seen {times:.1f} times in {counted(steps, 'step')}"
        for part, times in zip(mixture.parts, mixture.passes(steps * global_batch), strict=True)
        if times > 1
    ]
