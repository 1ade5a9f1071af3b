"""All shards of a folder: by several processes, and again where a run was killed.

A shard that is done has a note beside it, `shard-00003.json`, with a hash of all that decides its
bytes.  A later run makes the shards that have no such note, or whose files are no longer what the
note says.  The index takes the notes' place when all are there.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from ...formats.token_folder import (
    INDEX,
    Recipe,
    Shard,
    TokenFolder,
    TokenFolderError,
    TokenSource,
    file_hash,
    shard_file,
    shard_to_json,
    source_hash,
)
from .documents import Reader
from .encoding import Encoder
from .shards import Made, make_shard, sample_text, unfinished_files
from .sources import SourceError, Stretch, make_stretches

SAMPLE = "sample.txt"


class TokenizerChoice(NamedTuple):
    """A tokenizer.json, and the tokens around each document."""

    path: str
    bos: str
    eos: str

    def load(self) -> Encoder:
        """The tokenizer.  SourceError."""
        return Encoder(*self)


@dataclass(frozen=True)
class Preparation:
    """A folder that is to be made from sources."""

    folder: Path
    paths: Sequence[str]
    reader: Reader
    tokenizer: TokenizerChoice
    template: str
    skip_bad: bool
    stretch_bytes: int

    def run(self, workers: int, progress: Callable[[int, int], None]) -> TokenFolder:
        """Makes the shards that are not there yet, then the index.

        `progress` is told the shards that are done, and how many there are.  SourceError,
        BadRecord; TokenFolderError where the folder holds other data.
        """
        encoder = self.tokenizer.load()
        recipe = self._recipe(encoder)
        sources = tuple(
            TokenSource(path, os.path.getsize(path), source_hash(path)) for path in self.paths
        )
        done = _find_finished(self.folder, recipe, sources)
        if done is not None:
            return done
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in unfinished_files(self.folder):
            path.unlink()
        stretches = make_stretches(self.paths, self.stretch_bytes)
        notes = _Notes(self.folder, _key(recipe, sources, self.stretch_bytes))
        made_shards = notes.read(len(stretches))
        progress(len(made_shards), len(stretches))
        missing = [number for number in range(len(stretches)) if number not in made_shards]
        for number, result in self._make(missing, stretches, encoder, recipe.dtype, workers):
            notes.write(number, result)
            made_shards[number] = result
            progress(len(made_shards), len(stretches))
        return self._finish(
            recipe, sources, [made_shards[n] for n in sorted(made_shards)], encoder, notes
        )

    def _recipe(self, encoder: Encoder) -> Recipe:
        template = hashlib.sha256(self.template.encode()).hexdigest() if self.template else ""
        return Recipe(
            tokenizer=encoder.sha256,
            template=template,
            records=self.reader.words,
            vocab=encoder.largest + 1,
            bos=encoder.bos,
            eos=encoder.eos,
            masked=self.reader.masked,
            pair=self.reader.pair,
            skip_bad=self.skip_bad,
        )

    def make_shard(self, number: int, stretch: Stretch, encoder: Encoder, dtype: str) -> Made:
        """One shard.  BadRecord."""
        return make_shard(self.folder, number, stretch, self.reader, encoder, dtype, self.skip_bad)

    def _make(
        self,
        numbers: Sequence[int],
        stretches: Sequence[Stretch],
        encoder: Encoder,
        dtype: str,
        workers: int,
    ) -> Iterator[tuple[int, Made]]:
        """The shards of these numbers, as they are done."""
        if workers == 1 or len(numbers) == 1:
            for number in numbers:
                yield number, self.make_shard(number, stretches[number], encoder, dtype)
            return
        # a process that imports anew inherits no threads of the tokenizer's library
        pool = ProcessPoolExecutor(
            min(workers, len(numbers)),
            mp_context=get_context("spawn"),
            initializer=_begin_worker,
            initargs=(self, dtype),
        )
        with pool:
            futures = {pool.submit(_make_in_worker, n, stretches[n]): n for n in numbers}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _finish(
        self,
        recipe: Recipe,
        sources: tuple[TokenSource, ...],
        made_shards: Sequence[Made],
        encoder: Encoder,
        notes: "_Notes",
    ) -> TokenFolder:
        """Writes the sample and the index, and takes the notes away."""
        skipped = dict[str, int]()
        for result in made_shards:
            for reason, count in result.skipped.items():
                skipped[reason] = skipped.get(reason, 0) + count
        index = TokenFolder(recipe, sources, tuple(result.shard for result in made_shards), skipped)
        if not index.documents:
            raise SourceError("the sources have no document")
        first = next(shard for shard in index.shards if shard.documents)
        number = index.shards.index(first)
        sample = sample_text(self.folder, number, first, recipe.dtype, encoder)
        _write_whole(self.folder / SAMPLE, sample)
        _write_whole(self.folder / INDEX, index.to_json())
        notes.remove()
        return index


_worker: tuple[Preparation, str, Encoder] | None = None
"""In a worker's process: what it makes, and with which tokenizer."""


def _begin_worker(preparation: Preparation, dtype: str) -> None:
    global _worker
    _worker = preparation, dtype, preparation.tokenizer.load()


def _make_in_worker(number: int, stretch: Stretch) -> Made:
    assert _worker is not None, "prepare: a worker without its tokenizer"
    preparation, dtype, encoder = _worker
    return preparation.make_shard(number, stretch, encoder, dtype)


def _find_finished(
    folder: Path, recipe: Recipe, sources: tuple[TokenSource, ...]
) -> TokenFolder | None:
    """The index of a folder that was made of the same, None where there is no index.

    TokenFolderError where it was made of other sources or otherwise.
    """
    if not (folder / INDEX).exists():
        return None
    index = TokenFolder.read(folder)
    if index.recipe == recipe and index.sources == sources:
        return index
    reason = "of other sources" if index.recipe == recipe else "with other options or tokens"
    raise TokenFolderError(
        f"{folder} has tokens already, made {reason}: name another folder, or delete this one"
    )


def _key(recipe: Recipe, sources: Sequence[TokenSource], stretch_bytes: int) -> str:
    """A hash of all that decides the bytes of shards."""
    words = json.dumps([repr(recipe), [repr(source) for source in sources], stretch_bytes])
    return hashlib.sha256(words.encode()).hexdigest()


class _Notes:
    """The notes of shards that are done."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key

    def write(self, number: int, shard: Made) -> None:
        """Notes that a shard is done."""
        content = {"key": self._key, "shard": shard_to_json(shard.shard), "skipped": shard.skipped}
        _write_whole(self._path(number), json.dumps(content) + "\n")

    def read(self, count: int) -> dict[int, Made]:
        """The shards below `count` that are done, by number, with the files that the notes say."""
        made_shards = dict[int, Made]()
        for number in range(count):
            try:
                note: Mapping[str, Any] = json.loads(self._path(number).read_text(encoding="utf-8"))
                if note["key"] == self._key:
                    shard = Shard(**note["shard"])
                    if self._is_whole(number, shard):
                        made_shards[number] = Made(shard, note["skipped"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # made anew
        return made_shards

    def remove(self) -> None:
        """Takes all notes away."""
        for path in self._folder.glob("shard-*.json"):
            path.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:05}.json"

    def _is_whole(self, number: int, shard: Shard) -> bool:
        for kind, digest in shard.hashes.items():
            if file_hash(self._folder / shard_file(kind, number)) != digest:
                return False
        return True


def _write_whole(path: Path, text: str) -> None:
    """A text file, whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
