"""Reads any box of any tensor of a checkpoint, after checking the hashes of its files."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError, named
from ..state.shards import Box, common_shape, pieces, whole
from . import index, tensor_file
from .files import DAMAGE, and_is, cores_of_rank, index_of, natural
from .index import PADDED_ROWS, Identity

INDEX = "index.json"

_MODEL = "a run goes on with the model and the optimizer that it had"
_SIZES = (
    f"{_MODEL}; a change of `pad` alone is no such change, from runs on that have said their"
    " padding"
)
_PRECISION = (
    "masters have the type that `precision` says, and a checkpoint is not converted: go on"
    " with the precision it had,"
    " or begin with its weights, by --export and then --init"
)


class Saved:
    """A whole checkpoint, open for reading.  RunError where it is not what was written.

    The size and hash of a file are checked when the first of its tensors is asked for, whatever
    part of it; the hash once, also where another rank has done so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index, self.digest = _index_of(path)
        """The index, and a short hash of its text, which all ranks must have read alike."""
        self._files: dict[str, dict[str, Tensor]] = {}
        self._is_checked = False
        self._padded_rows: Mapping[str, int] = {}

    def __str__(self) -> str:
        return str(self.path)

    @property
    def run(self) -> Identity:
        """The identity of the run that saved it."""
        return self._index.run

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by key, whole, without their values: on the device `meta`."""
        entries = self._index.tensors.items()
        return {
            key: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for key, entry in entries
        }

    def parameters(self) -> dict[str, Tensor]:
        """The names of parameters."""
        return {
            key: tensor
            for key, tensor in self.tensors().items()
            if not key.startswith("optimizer/")
        }

    def whole(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors, of those that are here, by key."""
        self._check_parts(keys)
        return {key: self._joined(self._index.tensors[key]) for key in keys}

    def _joined(self, entry: index.Entry) -> Tensor:
        parts = [(part.extent, self._tensor(part, entry.dtype)) for part in entry.parts]
        # which asks for no more memory than the parts have
        joined = torch.empty(entry.shape, dtype=entry.dtype)
        for extent, values in parts:
            joined[extent.within(whole(entry.shape))] = values
        return joined

    def check_files(self, part: int, parts: int) -> None:
        """RunError unless these files, each `parts`th one from `part` on, are what was written;
        on several threads.
        """
        names = sorted(self._index.files)[part::parts]
        with ThreadPoolExecutor(max(1, min(cores_of_rank(), len(names)))) as pool:
            self._files.update(zip(names, pool.map(self._read, names), strict=True))

    def checked(self) -> None:
        """To be called when all files have been, by some rank."""
        self._is_checked = True

    def close(self) -> None:
        """Lets go of files and index, which are as large as the checkpoint asks for."""
        self._files.clear()
        self._index = replace(self._index, tensors={}, files={})

    def repad(self, padded_rows: Mapping[str, int]) -> None:
        """Has padding of rows be read as more or less of it: of a plan's parameters, by
        patterns, and of those here.
        """
        try:
            read: Mapping[str, Any] = json.loads(str(self.run.get(PADDED_ROWS, "{}")))
            here = {str(name): natural(rows) for name, rows in read.items()}
        except DAMAGE:
            raise RunError(
                f"{self.path / INDEX} is damaged: its run's `{PADDED_ROWS}` is no JSON of numbers"
            ) from None
        both = {**here, **padded_rows}
        self._padded_rows = {
            name: rows for name, rows in both.items() if here.get(name, rows) == rows
        }

    def _is_repadded(self, box: Box) -> bool:
        """Whether the tensor here differs from the plan's in rows of padding alone."""
        (rows, *others), (wanted, *wanted_others) = (
            (*self._index.tensors[box.key].shape, 0),
            (*box.shape, 0),
        )
        parameter = box.key.rpartition("/")[2]
        valid = next(
            (n for name, n in self._padded_rows.items() if fnmatchcase(parameter, name)), None
        )
        return (
            valid is not None
            and valid <= min(rows, wanted)
            and rows != wanted
            and others == wanted_others
        )

    def check(self, boxes: Sequence[Box]) -> None:
        """RunError unless each box is of a tensor that is here, of its element type, in a shape
        like its, and whole.
        """
        keys = list(dict.fromkeys(box.key for box in boxes))
        if missing := [key for key in keys if key not in self._index.tensors]:
            raise RunError(f"{self.path} lacks {named(missing)}: {_MODEL}")
        for box in boxes:
            entry = self._index.tensors[box.key]
            fits = common_shape(entry.shape, box.shape) is not None or self._is_repadded(box)
            if entry.dtype != box.tensor.dtype or not fits:
                saved, wanted = _kind(entry.shape, entry.dtype), _kind(box.shape, box.tensor.dtype)
                why = _SIZES if entry.dtype == box.tensor.dtype else _PRECISION
                raise RunError(
                    f"{self.path}: `{box.key}` is {saved}, but the plan's is {wanted}: {why}"
                )
        self._check_parts(keys)

    def _check_parts(self, keys: Sequence[str]) -> None:
        """RunError unless the parts of each of these tensors are all of it."""
        if fault := index.faults(self._index, keys):
            raise RunError(f"{self.path / INDEX}: {fault}")

    def copies(self, boxes: Iterable[Box]) -> list[tuple[Tensor, Tensor]]:
        """Parts of checked boxes, and what to copy into each: together all of them."""
        return [copy for box in boxes for copy in self._copies(box, self._index.tensors[box.key])]

    def _copies(self, box: Box, entry: index.Entry) -> Iterator[tuple[Tensor, Tensor]]:
        if self._is_repadded(box):
            yield from self._rows(box, entry)
            return
        common = common_shape(entry.shape, box.shape)
        assert common is not None, f"checkpoint: `{box.key}` was not checked"
        targets = pieces(box.extent, box.shape, common)
        for part in entry.parts:
            for source, target in product(pieces(part.extent, entry.shape, common), targets):
                if shared := source.extent.overlap(target.extent):
                    values = source.of(self._tensor(part, entry.dtype))[
                        shared.within(source.extent)
                    ]
                    yield target.of(box.tensor)[shared.within(target.extent)], values

    def _rows(self, box: Box, entry: index.Entry) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that both have; those of the plan alone are padding, and 0."""
        for part in entry.parts:
            if shared := part.extent.overlap(box.extent):
                values = self._tensor(part, entry.dtype)[shared.within(part.extent)]
                yield box.tensor[shared.within(box.extent)], values
        padding = box.tensor[max(0, entry.shape[0] - box.offset[0]) :]
        yield padding, torch.zeros_like(padding)

    def _tensor(self, part: index.Part, dtype: torch.dtype) -> Tensor:
        found = self._file(part.file).get(part.name)
        if found is None or (found.shape, found.dtype) != (part.extent.size, dtype):
            path, wanted = self.path / part.file, _kind(part.extent.size, dtype)
            raise RunError(f"{path} has no `{part.name}` that is {wanted}, though {INDEX} says so")
        return found

    def _file(self, name: str) -> dict[str, Tensor]:
        if name not in self._files:
            self._files[name] = self._read(name)
        return self._files[name]

    def _read(self, name: str) -> dict[str, Tensor]:
        return tensor_file.read(
            self.path / name, self._index.files[name], hashes=not self._is_checked
        )


def opened(saved: Path | Saved) -> Saved:
    """A checkpoint, open if it was not.  RunError."""
    return saved if isinstance(saved, Saved) else Saved(saved)


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _index_of(path: Path) -> tuple[index.Index, str]:
    file = path / INDEX
    if not file.exists() and (path / ".metadata").exists():
        how = f"`scalec convert PLAN {path} -o step-NNNNNN` makes a checkpoint of it"
        raise RunError(f"{path} is of torch.distributed.checkpoint: {how}")
    data = index_of(file)
    try:
        found = index.parsed(data)
    except RunError as error:
        raise RunError(f"{file} {error}{and_is(file)}") from None
    if path.name != folder_name(found.step):
        raise RunError(f"{path} holds step {found.step}: it was saved as {folder_name(found.step)}")
    return found, blake2b(data, digest_size=6).hexdigest()


def folder_name(step: int) -> str:
    """The name of the checkpoint after `step` steps."""
    return f"step-{step:06d}"
