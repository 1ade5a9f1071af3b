"""A plan's data: files of text or of token ids, or folders of `scalec data`, in one set or in
several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import RunError, count_with_noun
from .files import find_files, require_own_format, split_files
from .folder import FolderStream, Labelled, find_shards
from .mixture import Mixture, Part, Stream
from .samples import Windows


@dataclass(frozen=True)
class DataSet:
    """Files or folders of a mixture: glob patterns, or `python_stdlib`; its weight beside other
    sets; the share for validation.
    """

    name: str
    files: tuple[str, ...]
    weight: float = 1.0
    holdout: float = 0.0


@dataclass(frozen=True)
class Text(Windows):
    """Files of text, a token a byte: glob patterns, or `python_stdlib`; a share `holdout` is left
    for validation.

    In place of files there may be sets of files.
    """

    files: tuple[str, ...] = ()
    holdout: float = 0.05
    sets: tuple[DataSet, ...] = ()

    def find_files(self, patterns: tuple[str, ...], looks: bool) -> list[str]:
        """The files that patterns match.  RunError; where `looks`, also for no text."""
        return _find_readable(patterns, torch.uint8, looks and not self.as_is)

    def open_stream(self, paths: list[str], seq: int) -> Stream:
        """The windows of files for sequences of `seq`.  RunError."""
        return Stream(paths, torch.uint8, self.width(seq))


@dataclass(frozen=True)
class Tokens(Windows):
    """Files, as for `Text`, of nothing but token ids of one integer dtype."""

    files: tuple[str, ...] = ()
    dtype: torch.dtype = torch.uint16
    holdout: float = 0.05
    sets: tuple[DataSet, ...] = ()

    def find_files(self, patterns: tuple[str, ...], looks: bool) -> list[str]:
        """The files that patterns match.  RunError; where `looks`, also for no token ids."""
        return _find_readable(patterns, self.dtype, looks and not self.as_is)

    def open_stream(self, paths: list[str], seq: int) -> Stream:
        """The windows of files for sequences of `seq`.  RunError."""
        return Stream(paths, self.dtype, self.width(seq))


@dataclass(frozen=True)
class Folder(Labelled):
    """Folders, as the files of `Text`, that `scalec data` wrote."""

    files: tuple[str, ...] = ()
    holdout: float = 0.05
    sets: tuple[DataSet, ...] = ()

    def find_files(self, patterns: tuple[str, ...], looks: bool) -> list[str]:
        """The tokens of the folders' shards.  RunError where a folder is not whole; where
        `looks`, also where it has changed.
        """
        return find_shards(patterns, looks)

    def open_stream(self, paths: list[str], seq: int) -> Stream:
        """The windows of shards for sequences of `seq`.  RunError."""
        return FolderStream(paths, self.width(seq))


Corpus = Text | Tokens | Folder


def open_corpus(
    corpus: Corpus, files: tuple[str, ...], seq: int, looks: bool = True
) -> tuple[Mixture, Mixture | None]:
    """The data for training and, if some is held out, for validation; `files`, if any, in place of
    the corpus' sets.

    RunError where there is too little, or where files to validate with are trained on; where this
    rank `looks`, also where a file is of another format.
    """
    sets = corpus.sets
    if files or not sets:
        sets = (DataSet("", files or corpus.files, 1.0, corpus.holdout),)
    paths_by_set = {data_set: corpus.find_files(data_set.files, looks) for data_set in sets}
    shares = list[_Share]()
    for data_set, paths in paths_by_set.items():
        shares.append(_Share.make(data_set, paths, partial(corpus.open_stream, seq=seq)))
    _require_apart(shares)
    training = Mixture([share.training for share in shares])
    validation_parts = [share.validation for share in shares if share.validation]
    if not validation_parts:
        return training, None
    return training, Mixture(validation_parts)


def _find_readable(patterns: tuple[str, ...], dtype: torch.dtype, looks: bool) -> list[str]:
    """The files that patterns match; where `looks`, each of its own format."""
    paths = find_files(patterns)
    if looks:
        require_own_format(paths, dtype)
    return paths


@dataclass(frozen=True)
class _Share:
    """The parts of a set: one for training, and one that is held out for validation, if any."""

    training: Part
    validation: Part | None

    @classmethod
    def make(
        cls, data_set: DataSet, paths: list[str], open_stream: Callable[[list[str]], Stream]
    ) -> "_Share":
        """Whole files are held out where there are several; of a single file its last windows.

        RunError.
        """
        try:
            if len(paths) > 1 or data_set.holdout == 0:
                training_files, validation_files = split_files(paths, data_set.holdout)
                training = open_stream(training_files)
                validation = open_stream(validation_files) if validation_files else None
            else:
                training, validation = open_stream(paths).split(data_set.holdout)
        except RunError as error:
            if not data_set.name:
                raise
            raise RunError(f"set {data_set.name}: {error}") from None
        trained = Part(data_set.name, training, data_set.weight)
        if validation is None:
            return cls(trained, None)
        return cls(trained, Part(data_set.name, validation, data_set.weight))


def _require_apart(shares: list[_Share]) -> None:
    """RunError where a set trains on a window that another set validates with."""
    for share in shares:
        if share.validation is None:
            continue
        for other in shares:
            if share is other:
                continue
            if path := share.validation.stream.find_shared_file(other.training.stream):
                raise RunError(
                    f"{path} is held out of the set {share.training.name} and trained on in"
                    f" {other.training.name}: with `holdout = 0` in both, or in patterns that"
                    " do not overlap, it is not"
                )


def shortage_problem(mixture: Mixture, global_batch: int) -> str:
    """The problem of sets that have fewer sequences than a batch takes; "" if there are none."""
    problems = list[str]()
    for part, share in zip(mixture.parts, mixture.passes(global_batch), strict=True):
        if share <= 1:
            continue
        stream = part.stream
        prefix = f"{part.name}: " if part.name else ""
        problems.append(
            f"{prefix}{stream.tokens:,} tokens make {stream.windows:,} sequences of"
            f" {stream.width:,}, fewer than the {round(share * stream.windows):,} of a global batch"
        )
    return "; ".join(problems)


def holdout_lines(validation: Mixture | None) -> list[str]:
    """A line for each set of a single file, whose last windows are held out."""
    if validation is None:
        return []
    lines = list[str]()
    for part in validation.parts:
        stream = part.stream
        if stream.is_split:
            lines.append(
                f"validation: the last {count_with_noun(stream.windows, 'sequence')} of"
                f" {stream.files[0]},"
                f" of {stream.first + stream.windows:,}; training never sees them"
            )
    return lines


def repetition_lines(mixture: Mixture, steps: int, global_batch: int) -> list[str]:
    """A line for each set that the steps see more than once."""
    lines = list[str]()
    for part, times in zip(mixture.parts, mixture.passes(steps * global_batch), strict=True):
        if times > 1:
            name = part.name or "the data"
            lines.append(f"{name} is seen {times:.1f} times in {count_with_noun(steps, 'step')}")
    return lines
