"""Files of records: text, JSON lines, parquet and Arrow, cut into stretches.

A stretch is what one shard is made from.  It is a function of the sources alone, so that the
shards' bytes do not depend on the number of workers.
"""

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ...formats.known import FETCH, Ends, format_of

STRETCH = 64 << 20
"""Bytes of sources for a shard, about."""

PLAIN = (".txt", ".md")
LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst")
PARQUET, ARROW = ".parquet", ".arrow"
HUB = "hf:"

_TEXTS = ("json", "jsonl", "html")
"""Known formats that are text."""

KINDS = "`.txt`, `.md`, `.jsonl`, each of these with `.gz` or `.zst`, `.parquet`, `.arrow`"


class SourceError(Exception):
    """A source that cannot be read at all."""


class Place(NamedTuple):
    """Where a record lies: its file, and its number in the part of the file that began at byte
    `first`; number 0 is the whole file.
    """

    path: str
    number: int = 0
    first: int = 0
    is_line: bool = False

    def __str__(self) -> str:
        """As in `chat.jsonl:17`.  Only here are the lines before a part counted."""
        if not self.number:
            return self.path
        if not self.is_line:
            return f"{self.path}, row {self.number:,}"
        return f"{self.path}:{_lines_before(self.path, self.first) + self.number}"


class BadRecord(Exception):
    """A record that gives no document: its place, and why."""

    def __init__(self, place: Place, reason: str, detail: str = "") -> None:
        super().__init__(place, reason, detail)
        self.place, self.reason, self.detail = place, reason, detail

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.place}: {self.reason}{detail}"


class Record(NamedTuple):
    """A record with its place: fields by name, or the text of a file."""

    place: Place
    value: dict[str, Any] | str


class Part(NamedTuple):
    """A piece of a file: bytes of JSON lines, row groups of parquet; all of it where last is -1."""

    path: str
    first: int = 0
    last: int = -1


class Stretch(NamedTuple):
    """The parts of files that make one shard."""

    parts: tuple[Part, ...]


def find_sources(names: Sequence[str]) -> list[str]:
    """The files that sources name, each once, in the order of the names; folders' files sorted.

    SourceError where a name is nothing, or holds no file of a kind that is read.
    """
    files = dict[str, None]()
    for name in names:
        find = _from_hub if name.startswith(HUB) else _from_path
        files |= dict.fromkeys(find(name))
    return [*files]


def _from_path(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*") if file.is_file())
        readable = [file for file in files if kind_of(file)]
        if not readable:
            raise SourceError(f"{name} has no file that is read: {KINDS}")
        return readable
    if not path.exists():
        raise SourceError(f"there is no file or folder `{name}`")
    if not kind_of(name):
        raise SourceError(f"{name} is none of the files that are read: {KINDS}")
    return [name]


def _from_hub(name: str) -> list[str]:
    """The Arrow files of a data set of the Hugging Face hub, downloaded if need be."""
    name, _, split = name.removeprefix(HUB).partition(":")
    datasets = _package("datasets", f"hf:{name}")
    try:
        loaded = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the package raises errors of many kinds
        raise SourceError(f"hf:{name} cannot be loaded: {_first_line(error)}") from None
    return [str(file["filename"]) for file in loaded.cache_files]


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


def kind_of(path: str) -> str:
    """The suffix that says how a file is read, without `.gz` or `.zst`; "" if it is not read."""
    suffix = _suffix(path)
    if suffix in PLAIN + LINES:
        return suffix
    if suffix in (PARQUET, ARROW) and not _packing(path):
        return suffix
    return ""


def _packing(path: str) -> str:
    suffix = os.path.splitext(path)[1].lower()
    return suffix if suffix in PACKED else ""


def _suffix(path: str) -> str:
    root, suffix = os.path.splitext(path)
    if suffix.lower() in PACKED:
        suffix = os.path.splitext(root)[1]
    return suffix.lower()


def make_stretches(paths: Iterable[str], size: int = STRETCH) -> list[Stretch]:
    """The stretches of files, in their order, of about `size` bytes each.

    Small files are put together; JSON lines are cut at lines and parquet files at row groups.
    SourceError where a file cannot be looked at.
    """
    stretches = list[Stretch]()
    parts = list[Part]()
    room = size
    for path in paths:
        for part, weight in _parts(path, size):
            if parts and weight > room:
                stretches.append(Stretch(tuple(parts)))
                parts, room = [], size
            parts.append(part)
            room -= weight
    if parts:
        stretches.append(Stretch(tuple(parts)))
    return stretches


def _parts(path: str, size: int) -> Iterator[tuple[Part, int]]:
    """The parts of a file, each with its bytes."""
    bytes_of_file = os.path.getsize(path)
    if bytes_of_file <= size or _packing(path):
        yield Part(path), bytes_of_file
    elif kind_of(path) in LINES:
        for first in range(0, bytes_of_file, size):
            last = min(first + size, bytes_of_file)
            yield Part(path, first, last), last - first
    elif kind_of(path) == PARQUET:
        yield from _row_groups(path)
    else:
        yield Part(path), bytes_of_file


def _row_groups(path: str) -> Iterator[tuple[Part, int]]:
    metadata = _open_parquet(path).metadata
    for number in range(metadata.num_row_groups):
        yield Part(path, number, number + 1), metadata.row_group(number).total_byte_size


def read_records(part: Part, fields: Sequence[str]) -> Iterator[Record | BadRecord]:
    """The records of a part; of columns only `fields`, if there are any.

    A line that cannot be read is a BadRecord in its place, so that a reader may skip it.
    SourceError where the whole file cannot be read.
    """
    kind = kind_of(part.path)
    try:
        if kind in LINES:
            yield from _lines(part)
        elif kind == PARQUET:
            yield from _parquet_rows(part, fields)
        elif kind == ARROW:
            yield from _arrow_rows(part, fields)
        else:
            yield _whole_text(part)
    except (OSError, EOFError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise SourceError(f"cannot read {part.path}: {words}") from None


def _whole_text(part: Part) -> Record | BadRecord:
    with _open(part.path) as file:
        content = file.read()
    return _decode(content, Place(part.path))


def _decode(content: bytes, place: Place) -> Record | BadRecord:
    try:
        return Record(place, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecord(
            place, "not UTF-8", f"byte {error.start:,} is 0x{content[error.start]:02x}"
        )


def _lines(part: Part) -> Iterator[Record | BadRecord]:
    """The lines that begin in a part: a line over the border of two is of the first one."""
    with _open(part.path) as file:
        if part.first:
            file.seek(part.first - 1)
            file.readline()
        number = 0
        while part.last < 0 or file.tell() < part.last:
            line = file.readline()
            if not line:
                return
            number += 1
            if line.strip():
                yield _line_record(line, Place(part.path, number, part.first, is_line=True))


def _lines_before(path: str, first: int) -> int:
    """The number of lines that begin before a byte of a file that is not packed."""
    if first == 0:
        return 0
    count, left, last = 0, first, b""
    with open(path, "rb") as file:
        while left and (piece := file.read(min(left, 1 << 20))):
            count += piece.count(b"\n")
            left -= len(piece)
            last = piece[-1:]
    return count + (last != b"\n")


def _line_record(line: bytes, place: Place) -> Record | BadRecord:
    text = _decode(line, place)
    if isinstance(text, BadRecord):
        return text
    try:
        value = json.loads(cast(str, text.value))
    except ValueError as error:
        return BadRecord(place, "not JSON", str(error))
    if not isinstance(value, dict):
        return BadRecord(place, "not an object", "each line is one: {…}")
    return Record(place, cast(dict[str, Any], value))


def _parquet_rows(part: Part, fields: Sequence[str]) -> Iterator[Record]:
    file = _open_parquet(part.path)
    groups = range(part.first, file.num_row_groups if part.last < 0 else part.last)
    number = sum(file.metadata.row_group(group).num_rows for group in range(part.first))
    columns = _columns(fields, file.schema_arrow.names)
    for batch in file.iter_batches(row_groups=[*groups], columns=columns, batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield Record(Place(part.path, number), row)


def _arrow_rows(part: Part, fields: Sequence[str]) -> Iterator[Record]:
    pyarrow, ipc = _package("pyarrow", part.path), _package("pyarrow.ipc", part.path)
    with pyarrow.memory_map(part.path) as source:
        try:
            batches = ipc.open_stream(source)
        except pyarrow.ArrowInvalid:  # a file of its random-access format
            reader = ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        number = 0
        for batch in batches:
            columns = _columns(fields, batch.schema.names)
            for row in batch.select(columns).to_pylist():
                number += 1
                yield Record(Place(part.path, number), row)


def _columns(fields: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns to read; a field that is missing is told with the first record."""
    return [name for name in names if name in fields] or [*names]


def _open_parquet(path: str) -> Any:
    parquet = _package("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's own errors are among these
        raise SourceError(f"{path} is no parquet file: {_first_line(error)}") from None


def _package(name: str, what: str) -> Any:
    """A package of `scalec[data]`.  SourceError where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise SourceError(
            f"{what} needs the package {package}: pip install 'scalec[data]'"
        ) from None


def _open(path: str) -> IO[bytes]:
    """A file, unpacked while it is read.  SourceError where it is not what its name says."""
    packing = _packing(path)
    ends = Ends.from_path(path)
    known = format_of(ends)
    word = known.word if known else ""
    if word == "lfs":
        raise SourceError(f"{path} is a pointer of Git LFS in place of the file itself: {FETCH}")
    if packing == ".gz" and word == "gzip":
        return cast(IO[bytes], gzip.open(path))
    if packing == ".zst" and word == "zstd":
        unpacked = _package("zstandard", path).open(path, "rb")
        return io.BufferedReader(unpacked)
    if packing and ends.size:
        raise SourceError(f"{path} is not compressed as its name says")
    if known and kind_of(path) in PLAIN + LINES and word not in _TEXTS:
        raise SourceError(f"{path} is {known.name}, not text")
    return open(path, "rb")
