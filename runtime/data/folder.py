"""Folders of `scalec data`: their shards as windows, with marks at what counts and where documents
begin.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...formats.token_folder import (
    COUNTS,
    DOCUMENTS,
    INDEX,
    TOKENS,
    TokenFolder,
    TokenFolderError,
    file_hash,
    shard_file,
    sibling,
)
from ..errors import RunError
from .files import TokenFiles, find_folders
from .mixture import Stream
from .samples import IGNORED, Marks, Windows

MOST_HASHED = 4 << 30
"""Bytes of shards whose hashes are compared at a run's start, some seconds of a disk."""

_FILES_OF_STARTS = 64
"""The most shards whose documents' starts are held in memory."""


@dataclass(frozen=True, kw_only=True)
class Labelled(Windows):
    """Samples of which some tokens do not count, and whose documents are known.

    A token is the label of the one before it, unless it does not count or begins a document.
    """

    def make_inputs(
        self,
        windows: Tensor,
        samples: list[int],
        vocab: int,
        seed: int,
        marks: Marks | None = None,
    ) -> dict[str, Tensor]:
        """As `Windows.make_inputs`."""
        assert marks is not None, "folder: windows without marks"
        counts = marks.counted & ~marks.begins
        documents = marks.begins.long().cumsum(-1)
        return {
            "tokens": windows[:, :-1],
            "labels": windows[:, 1:].masked_fill(~counts[:, 1:], IGNORED),
            "documents": documents[:, :-1] - documents[:, :1],
        }


def find_shards(patterns: tuple[str, ...], looks: bool) -> list[str]:
    """The tokens of all shards of the folders that patterns match.

    RunError where a folder has no index, or its files are not as long as the index says; where
    `looks`, also where a file has other content than the index says.
    """
    paths, hashes = list[str](), dict[str, str]()
    for folder in find_folders(patterns):
        index = read_index(folder)
        for number, shard in enumerate(index.shards):
            path = os.path.join(folder, shard_file(TOKENS, number))
            sizes = {
                TOKENS: shard.tokens * torch_dtype(index).itemsize,
                DOCUMENTS: shard.documents * 8,
                COUNTS: -(-shard.tokens // 8),
            }
            for kind, digest in shard.hashes.items():
                _require_size(sibling(path, kind), sizes[kind], folder)
                hashes[sibling(path, kind)] = digest
            if shard.tokens:
                paths.append(path)
    if looks:
        _require_content(hashes)
    return paths


def _require_content(hashes: Mapping[str, str]) -> None:
    """RunError where a file is not the one that was hashed; of large folders some files, evenly
    spread, are read.
    """
    size = sum(map(os.path.getsize, hashes))
    step = max(1, -(-size // MOST_HASHED))
    for path in [*hashes][::step]:
        try:
            digest = file_hash(path)
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from None
        if digest != hashes[path]:
            raise RunError(
                f"{path} has changed since `scalec data` wrote it: {INDEX} has another hash",
                "delete the folder, and make it again with `scalec data`",
            )


def read_index(folder: str) -> TokenFolder:
    """The index of a folder to train on.  RunError."""
    try:
        index = TokenFolder.read(folder)
        index.require_samples(folder)
    except TokenFolderError as error:
        raise RunError(f"no data: {error}") from None
    return index


def torch_dtype(index: TokenFolder) -> torch.dtype:
    """The type of a folder's tokens."""
    return torch.uint16 if index.recipe.dtype == "uint16" else torch.uint32


def _require_size(path: str, size: int, folder: str) -> None:
    try:
        there = os.path.getsize(path)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    if there != size:
        raise RunError(
            f"{path} has {there:,} bytes, and {os.path.join(folder, INDEX)} says {size:,}",
            "delete the folder, and make it again with `scalec data`",
        )


class FolderStream(Stream):
    """The shards of folders, cut into windows as the files of any stream.

    RunError where folders are of several tokenizers.
    """

    def __init__(self, files: list[str], width: int) -> None:
        indexes = {folder: read_index(folder) for folder in map(os.path.dirname, files)}
        first, *others = indexes
        for folder in others:
            if indexes[folder].recipe.tokenizer != indexes[first].recipe.tokenizer:
                raise RunError(
                    f"{folder} and {first} have tokens of two tokenizers: an id is not the same"
                    " token in both"
                )
        super().__init__(files, torch_dtype(indexes[first]), width)
        # an earlier run may have left files that the index does not know
        masked = {path for path in files if indexes[os.path.dirname(path)].recipe.masked}
        self._kinds = dict.fromkeys(files, (TOKENS, DOCUMENTS))
        self._kinds |= dict.fromkeys(masked, (TOKENS, DOCUMENTS, COUNTS))
        self._counts = _Bits([sibling(path, COUNTS) if path in masked else "" for path in files])
        starts = [sibling(path, DOCUMENTS) for path in files]
        read_starts = TokenFiles(starts, torch.int64)
        lengths = read_starts.lengths

        @lru_cache(maxsize=_FILES_OF_STARTS)
        def starts_of(file: int) -> Tensor:
            return read_starts.read(file, 0, lengths[file])

        self._starts_of = starts_of

    @property
    def read_files(self) -> tuple[str, ...]:
        """The shards' files of all kinds."""
        return tuple(sibling(path, kind) for path in self.files for kind in self._kinds[path])

    def marks(self, number: int) -> Marks:
        """Which tokens of a window count, and which begin a document."""
        marks = [self._marks_of(*stretch) for stretch in self.stretches(number)]
        counted = torch.cat([piece.counted for piece in marks])
        return Marks(counted, torch.cat([piece.begins for piece in marks]))

    def _marks_of(self, file: int, start: int, stop: int) -> Marks:
        starts = self._starts_of(file)
        inside = starts[(starts >= start) & (starts < stop)]
        begins = torch.zeros(stop - start, dtype=torch.bool)
        begins[inside - start] = True
        return Marks(self._counts.read(file, start, stop), begins)


class _Bits:
    """Files with a bit a token; all tokens of a shard count where its path is ""."""

    def __init__(self, paths: list[str]) -> None:
        self._numbers: dict[int, int] = {}
        for shard, path in enumerate(paths):
            if path:
                self._numbers[shard] = len(self._numbers)
        self._files = TokenFiles([path for path in paths if path], torch.uint8)

    def read(self, file: int, start: int, stop: int) -> Tensor:
        """The bits of tokens start to stop of a shard: bool, [stop - start]."""
        if file not in self._numbers:
            return torch.ones(stop - start, dtype=torch.bool)
        first = start // 8
        packed = self._files.read(self._numbers[file], first, -(-stop // 8))
        bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten()[start - 8 * first : stop - 8 * first].bool()
