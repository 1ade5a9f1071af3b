"""The index of a checkpoint: shape, element type and shards of every tensor; size and hash of every
file.

While ranks write, each has an index of its own part; the checkpoint's index joins them.

The text begins with a hash of all its other bytes.  So a byte that a disk has changed is noticed,
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
from .files import DAMAGE, is_within, to_natural, to_shape
from .hf_weights import DTYPES
from .tensor_file import NAMES, Stamp

_FORMAT = "scalec checkpoint"
_VERSION, _WITHOUT_HASH = 2, 1
_HASH = "blake2b"
_DIGITS = 64  # of the hash, in hexadecimal
_OPENING = f'{{"format": "{_FORMAT}", "version": {_VERSION}, "{_HASH}": "'.encode()

PADDED_ROWS = "padded rows"
"""The name of a run's setting for padded parameters: as JSON, by pattern of names, the rows that
each has without padding.
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


def make_index(step: int, file: str, boxes: Mapping[str, Box], stamp: Stamp) -> Index:
    """The index of one file, with the boxes by their names in it."""
    parts_of: dict[str, list[Part]] = {}
    box_of = {box.key: box for box in boxes.values()}
    for name, box in boxes.items():
        parts_of.setdefault(box.key, []).append(Part(box.extent, file, name))
    entries = dict[str, Entry]()
    for key, parts in parts_of.items():
        box = box_of[key]
        entries[key] = Entry(box.shape, box.tensor.dtype, tuple(parts))
    return Index(step, entries, {file: stamp})


def merge(indices: Sequence[Index]) -> Index:
    """The index of a whole checkpoint, from the indices of its ranks' parts.

    Asserts that the parts are of one checkpoint.
    """
    steps = {index.step for index in indices}
    assert len(steps) == 1, f"checkpoint: ranks are at steps {steps}"
    shares, files = dict[str, list[Entry]](), dict[str, Stamp]()
    for index in indices:
        files |= index.files
        for key, entry in index.tensors.items():
            shares.setdefault(key, []).append(entry)
    tensors = {key: _join_entries(key, entries) for key, entries in shares.items()}
    return Index(steps.pop(), tensors, files)


def _join_entries(key: str, entries: Sequence[Entry]) -> Entry:
    kinds, parts = set[tuple[Shape, torch.dtype]](), list[Part]()
    for entry in entries:
        kinds.add((entry.shape, entry.dtype))
        parts.extend(entry.parts)
    assert len(kinds) == 1, f"checkpoint: ranks differ over `{key}`: {kinds}"
    return Entry(*kinds.pop(), tuple(parts))


def find_fault(index: Index, keys: Iterable[str]) -> str:
    """The first of these tensors whose parts are not all of it, and why; "" if there is none."""
    for key in keys:
        entry = index.tensors[key]
        if gap := fault(entry.shape, [part.extent for part in entry.parts]):
            return f"`{key}`: {gap}"
    return ""


def to_json(index: Index) -> bytes:
    """The index as JSON."""
    tensors = {key: _fields_of_entry(entry) for key, entry in index.tensors.items()}
    files = dict[str, dict[str, Any]]()
    for name, stamp in index.files.items():
        files[name] = {"bytes": stamp.size, "blake2b": stamp.blake2b}
    return to_hashed_json(
        {"step": index.step, "run": {**index.run}, "tensors": tensors, "files": files}
    )


def _fields_of_entry(entry: Entry) -> dict[str, Any]:
    """A tensor, as JSON has it."""
    boxes = list[dict[str, Any]]()
    for part in entry.parts:
        boxes.append(
            {
                "offset": part.extent.offset,
                "size": part.extent.size,
                "file": part.file,
                "name": part.name,
            }
        )
    return {"shape": entry.shape, "dtype": NAMES[entry.dtype], "boxes": boxes}


def to_hashed_json(content: Mapping[str, Any]) -> bytes:
    """The content as JSON, behind the format, its version and the hash of all but the hash
    itself.
    """
    after_hash = b'", ' + json.dumps(content).encode().removeprefix(b"{") + b"\n"
    return _OPENING + _hash_of(after_hash) + after_hash


def _hash_of(after_hash: bytes) -> bytes:
    """The hash of a text that goes on with `after_hash` behind its hash."""
    return blake2b(_OPENING + after_hash, digest_size=_DIGITS // 2).hexdigest().encode()


def parse(data: bytes) -> Index:
    """The index that JSON of `text` describes.

    RunError if the data is no such JSON, has changed since, or is of another version.
    """
    try:
        content = json.loads(data)
        _check_text(content, data)
        return _index(content)
    except DAMAGE:
        raise RunError("is damaged, or no index of a checkpoint") from None


def _check_text(content: Any, data: bytes) -> None:
    """ValueError unless the text is as it was written; RunError where its version is another."""
    if content["format"] != _FORMAT:
        raise ValueError
    if content["version"] == _WITHOUT_HASH:
        if _HASH in content:  # the version is what has changed
            raise ValueError
        return
    if content["version"] != _VERSION:
        versions = f"{_WITHOUT_HASH} and {_VERSION}"
        raise RunError(f"has format version {content['version']}; this program reads {versions}")
    start, stop = len(_OPENING), len(_OPENING) + _DIGITS
    if not data.startswith(_OPENING) or data[start:stop] != _hash_of(data[stop:]):
        raise ValueError


def _index(content: Any) -> Index:
    files = dict[str, Stamp]()
    for name, fields in content["files"].items():
        files[name] = Stamp(to_natural(fields["bytes"]), str(fields["blake2b"]))
    # all files lie in the checkpoint's own folder
    if any("/" in name or not is_within(name) for name in files):
        raise ValueError
    tensors = {key: _entry(fields, files) for key, fields in content["tensors"].items()}
    # earlier versions had no settings of a run
    return Index(to_natural(content["step"]), tensors, files, _run(content.get("run", {})))


def _run(settings: Any) -> Identity:
    if not all(isinstance(value, str | int | float | None) for value in settings.values()):
        raise ValueError
    to_natural(settings.get("global_batch", 0))  # a run that goes on computes with it
    return settings


def _entry(fields: Any, files: Mapping[str, Stamp]) -> Entry:
    sizes = to_shape(fields["shape"])
    parts = tuple(_part(box, len(sizes), files) for box in fields["boxes"])
    return Entry(sizes, DTYPES[fields["dtype"]], parts)


def _part(fields: Any, dims: int, files: Mapping[str, Stamp]) -> Part:
    extent, file = Extent(to_shape(fields["offset"]), to_shape(fields["size"])), fields["file"]
    if not len(extent.offset) == len(extent.size) == dims or file not in files:
        raise ValueError
    return Part(extent, file, str(fields["name"]))
