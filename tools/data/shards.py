"""A stretch of sources to the files of one shard."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ...formats.token_folder import (
    COUNTS,
    DOCUMENTS,
    TOKENS,
    Shard,
    file_hash,
    shard_file,
)
from .documents import Document, Reader
from .encoding import Array, Encoded, Encoder
from .sources import BadRecord, Stretch, read_records

BATCH = 512
"""Documents that are encoded at once."""


class Made(NamedTuple):
    """A shard that was made, and the records that it left out by the reason."""

    shard: Shard
    skipped: dict[str, int]


def make_shard(
    folder: Path,
    number: int,
    stretch: Stretch,
    reader: Reader,
    encoder: Encoder,
    dtype: str,
    skip_bad: bool,
) -> Made:
    """Writes the files of a shard, each whole or not at all.

    BadRecord for the first record that gives no document, unless it is to be skipped.
    """
    skipped = dict[str, int]()
    writer = _Writer(folder, number, dtype, reader.masked)
    try:
        for encoded in _encode_records(stretch, reader, encoder):
            if isinstance(encoded, BadRecord):
                if not skip_bad:
                    raise encoded
                skipped[encoded.reason] = skipped.get(encoded.reason, 0) + 1
            else:
                for document in encoded:
                    writer.add(document)
        return Made(writer.finish(), skipped)
    finally:
        writer.close()


def _encode_records(
    stretch: Stretch, reader: Reader, encoder: Encoder
) -> Iterator[list[Encoded] | BadRecord]:
    """The ids of each record, in order; a record of two documents gives both or neither."""
    records = _documents(stretch, reader)
    while group := [*islice(records, BATCH)]:
        texts = [document for record in group if isinstance(record, list) for document in record]
        results = iter(encoder.encode(texts))
        for record in group:
            if isinstance(record, BadRecord):
                yield record
                continue
            both = [next(results) for _ in record]
            bad = [result for result in both if isinstance(result, BadRecord)]
            if bad:
                yield bad[0]
            else:
                yield [result for result in both if isinstance(result, Encoded)]


def _documents(stretch: Stretch, reader: Reader) -> Iterator[list[Document] | BadRecord]:
    """The documents of each record."""
    for part in stretch.parts:
        for record in read_records(part, reader.fields):
            if isinstance(record, BadRecord):
                yield record
                continue
            try:
                yield [*reader.documents(record)]
            except BadRecord as bad:
                yield bad


class _Writer:
    """The files of a shard under other names, until they are whole."""

    def __init__(self, folder: Path, number: int, dtype: str, masked: bool) -> None:
        kinds = (TOKENS, COUNTS, DOCUMENTS) if masked else (TOKENS, DOCUMENTS)
        self._paths = {kind: folder / shard_file(kind, number) for kind in kinds}
        self._files: dict[str, IO[bytes]] = {}
        for kind, path in self._paths.items():
            self._files[kind] = open(_unfinished_path(path), "wb")  # noqa: SIM115  # closed by `close`
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = self._documents = self._counted = 0
        self._bits = np.zeros(0, dtype=bool)  # those that fill no byte yet

    def add(self, document: Encoded) -> None:
        """Appends a document."""
        start = np.array([self._tokens], dtype="<u8")
        self._files[DOCUMENTS].write(start.tobytes())
        self._files[TOKENS].write(document.ids.astype(self._dtype).tobytes())
        self._tokens += len(document.ids)
        self._documents += 1
        if COUNTS not in self._files:
            self._counted += len(document.ids)
            return
        counted = document.counted
        assert counted is not None, "shards: a document without its mask"
        self._counted += int(counted.sum())
        bits = np.concatenate([self._bits, counted])
        whole = len(bits) // 8 * 8
        self._write_bits(bits[:whole])
        self._bits = bits[whole:]

    def finish(self) -> Shard:
        """Gives the files their names, and their hashes."""
        if COUNTS in self._files:
            self._write_bits(self._bits)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        hashes = dict[str, str]()
        for kind, path in self._paths.items():
            os.replace(_unfinished_path(path), path)
            hashes[kind] = file_hash(path)
        return Shard(self._tokens, self._documents, self._counted, hashes)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def _write_bits(self, bits: Array) -> None:
        self._files[COUNTS].write(np.packbits(bits, bitorder="little").tobytes())


def _unfinished_path(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def unfinished_files(folder: Path) -> Iterable[Path]:
    """Files of shards that a killed run left."""
    return folder.glob("*.bin.tmp")


def sample_text(
    folder: Path, number: int, shard: Shard, dtype: str, encoder: Encoder, most: int = 3
) -> str:
    """The first documents of a shard decoded, what counts in ⟦ ⟧."""
    starts = np.fromfile(folder / shard_file(DOCUMENTS, number), dtype="<u8", count=most + 1)
    ends = [*starts[1:], shard.tokens][:most]
    last = int(ends[-1])
    ids = np.fromfile(
        folder / shard_file(TOKENS, number), dtype=np.dtype(dtype).newbyteorder("<"), count=last
    )
    counted: Any = None
    if COUNTS in shard.hashes:
        packed = np.fromfile(
            folder / shard_file(COUNTS, number), dtype=np.uint8, count=-(-last // 8)
        )
        counted = np.unpackbits(packed, bitorder="little")[:last].astype(bool)
    texts = list[str]()
    for document, (start, end) in enumerate(zip(starts, ends, strict=False), start=1):
        marks = counted[int(start) : int(end)] if counted is not None else None
        texts.append(f"--- document {document}, {int(end - start):,} tokens")
        texts.append(_mark_counted(ids[int(start) : int(end)], marks, encoder))
    return "\n".join(texts) + "\n"


def _mark_counted(ids: Array, counted: Array | None, encoder: Encoder) -> str:
    if counted is None:
        return encoder.decode(ids)
    text, start = "", 0
    borders = [*(np.flatnonzero(counted[1:] != counted[:-1]) + 1), len(ids)]
    for border in borders:
        piece = encoder.decode(ids[start:border])
        text += f"⟦{piece}⟧" if counted[start] else piece
        start = int(border)
    return text
