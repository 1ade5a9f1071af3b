"""The index of a checkpoint: shape, element type and shards of every tensor; size and hash of every
file.

While ranks write, each has an index of its own part; the checkpoint's is all of them as one.

The text begins with a hash of all its other bytes, so that a byte that a disk has changed is found,
in the run's settings too.  Version 1 of the format had no such hash.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from ..errors import RunError
from ..state.shards import Box, Extent, Shape, fault
from .files import DAMAGE, is_within, natural, shape
from .hf_weights import DTYPES
from .tensor_file import NAMES, Stamp

_FORMAT = "scalec checkpoint"
_VERSION, _WITHOUT_HASH = 2, 1
_HASH = "blake2b"
_DIGITS = 64  # of the hash, in hexadecimal
_OPENING = f'{{"format": "{_FORMAT}", "version": {_VERSION}, "{_HASH}": "'.encode()

PADDED_ROWS = "padded rows"
"""The setting of a run that has the rows of each padded parameter without padding, as JSON, by
patterns of names.
"""

Identity = Mapping[str, str | int | float | None]
"""The identity of a run: settings by name."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a tensor, the file that has it, and its name there."""

    extent: Extent
    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: the shape of the whole, and its parts."""

    shape: Shape
    dtype: torch.dtype
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """All tensors by key, and all files by name, after `step` finished steps of such a run."""

    step: int
    tensors: Mapping[str, Entry]
    files: Mapping[str, Stamp]
    run: Identity = field(default_factory=dict[str, Any])


def of(step: int, file: str, boxes: Mapping[str, Box], stamp: Stamp) -> Index:
    """The index of one file, with the boxes by their names in it."""
    tensors: dict[str, list[Part]] = {}
    about = {box.key: box for box in boxes.values()}
    for name, box in boxes.items():
        tensors.setdefault(box.key, []).append(Part(box.extent, file, name))
    entries = {
        key: Entry(about[key].shape, about[key].tensor.dtype, tuple(parts))
        for key, parts in tensors.items()
    }
    return Index(step, entries, {file: stamp})


def merged(indices: Sequence[Index]) -> Index:
    """The index of a whole checkpoint from the ranks' parts; asserts that they are parts of the
    same.
    """
    steps = {index.step for index in indices}
    assert len(steps) == 1, f"checkpoint: ranks are at steps {steps}"
    shares, files = dict[str, list[Entry]](), dict[str, Stamp]()
    for index in indices:
        files |= index.files
        for key, entry in index.tensors.items():
            shares.setdefault(key, []).append(entry)
    return Index(
        steps.pop(), {key: _joined(key, entries) for key, entries in shares.items()}, files
    )


def _joined(key: str, entries: Sequence[Entry]) -> Entry:
    kinds = {(entry.shape, entry.dtype) for entry in entries}
    assert len(kinds) == 1, f"checkpoint: ranks differ over `{key}`: {kinds}"
    return Entry(*kinds.pop(), tuple(part for entry in entries for part in entry.parts))


def faults(index: Index, keys: Iterable[str]) -> str:
    """The first of these tensors whose parts are not the whole, and why; empty if all are."""
    for key in keys:
        entry = index.tensors[key]
        if found := fault(entry.shape, [part.extent for part in entry.parts]):
            return f"`{key}`: {found}"
    return ""


def text(index: Index) -> bytes:
    """As JSON."""
    tensors = {
        key: {
            "shape": entry.shape,
            "dtype": NAMES[entry.dtype],
            "boxes": [
                {
                    "offset": part.extent.offset,
                    "size": part.extent.size,
                    "file": part.file,
                    "name": part.name,
                }
                for part in entry.parts
            ],
        }
        for key, entry in index.tensors.items()
    }
    files = {
        name: {"bytes": stamp.size, "blake2b": stamp.blake2b} for name, stamp in index.files.items()
    }
    return hashed({"step": index.step, "run": {**index.run}, "tensors": tensors, "files": files})


def hashed(content: Mapping[str, Any]) -> bytes:
    """The content as JSON, behind the format, its version and the hash of all but the hash
    itself.
    """
    rest = b'", ' + json.dumps(content).encode().removeprefix(b"{") + b"\n"
    return _OPENING + _hash_of(rest) + rest


def _hash_of(rest: bytes) -> bytes:
    """The hash of a text that goes on with `rest` after its hash."""
    return blake2b(_OPENING + rest, digest_size=_DIGITS // 2).hexdigest().encode()


def parsed(data: bytes) -> Index:
    """Reads the JSON of `text`.

    RunError if it is none, has changed since, or is of another version.
    """
    try:
        read = json.loads(data)
        _check_text(read, data)
        return _index(read)
    except DAMAGE:
        raise RunError("is damaged, or no index of a checkpoint") from None


def _check_text(read: Any, data: bytes) -> None:
    """ValueError unless the text is as it was written; RunError where its version is another."""
    if read["format"] != _FORMAT:
        raise ValueError
    if read["version"] == _WITHOUT_HASH:
        if _HASH in read:  # the version is what has changed
            raise ValueError
        return
    if read["version"] != _VERSION:
        versions = f"{_WITHOUT_HASH} and {_VERSION}"
        raise RunError(f"has format version {read['version']}; this program reads {versions}")
    start, stop = len(_OPENING), len(_OPENING) + _DIGITS
    if not data.startswith(_OPENING) or data[start:stop] != _hash_of(data[stop:]):
        raise ValueError


def _index(read: Any) -> Index:
    files = {
        name: Stamp(natural(each["bytes"]), str(each["blake2b"]))
        for name, each in read["files"].items()
    }
    # all lie in the checkpoint's own folder
    if any("/" in name or not is_within(name) for name in files):
        raise ValueError
    tensors = {key: _entry(each, files) for key, each in read["tensors"].items()}
    # earlier versions had none
    return Index(natural(read["step"]), tensors, files, _run(read.get("run", {})))


def _run(read: Any) -> Identity:
    if not all(isinstance(value, str | int | float | None) for value in read.values()):
        raise ValueError
    natural(read.get("global_batch", 0))  # which is reckoned with
    return read


def _entry(read: Any, files: Mapping[str, Stamp]) -> Entry:
    sizes = shape(read["shape"])
    return Entry(
        sizes, DTYPES[read["dtype"]], tuple(_part(box, len(sizes), files) for box in read["boxes"])
    )


def _part(read: Any, dims: int, files: Mapping[str, Stamp]) -> Part:
    extent, file = Extent(shape(read["offset"]), shape(read["size"])), read["file"]
    if not len(extent.offset) == len(extent.size) == dims or file not in files:
        raise ValueError
    return Part(extent, file, str(read["name"]))
