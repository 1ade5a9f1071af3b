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

from ..errors import RunError, quote_first_names
from ..state.shards import Box, common_shape, pieces, whole
from . import index, tensor_file
from .files import DAMAGE, cores_of_rank, describe_format, index_of, to_natural
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

    The size and hash of a file are checked when any part of one of its tensors is first asked for.
    The hash is checked once, by any rank.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index, self.digest = _index_of(path)
        """The index, and a short hash of its text, which must be the same on all ranks."""
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
        tensors = dict[str, Tensor]()
        for key, entry in self._index.tensors.items():
            tensors[key] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return tensors

    def parameters(self) -> dict[str, Tensor]:
        """All parameters by name, as `tensors` has them."""
        tensors = self.tensors()
        return {key: tensors[key] for key in tensors if not key.startswith("optimizer/")}

    def whole(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors, which this checkpoint must have, by key."""
        self._check_parts(keys)
        return {key: self._join_parts(self._index.tensors[key]) for key in keys}

    def _join_parts(self, entry: index.Entry) -> Tensor:
        parts = [(part.extent, self._tensor(part, entry.dtype)) for part in entry.parts]
        # made after the parts are checked, so that it takes no more memory than they have
        joined = torch.empty(entry.shape, dtype=entry.dtype)
        for extent, values in parts:
            joined[extent.within(whole(entry.shape))] = values
        return joined

    def check_files(self, part: int, parts: int) -> None:
        """RunError unless these files, each `parts`th one from `part` on, are what was written.

        Reads them on several threads.
        """
        names = sorted(self._index.files)[part::parts]
        with ThreadPoolExecutor(max(1, min(cores_of_rank(), len(names)))) as pool:
            self._files.update(zip(names, pool.map(self._read, names), strict=True))

    def mark_checked(self) -> None:
        """Says that ranks have checked all files, so that none is hashed again."""
        self._is_checked = True

    def close(self) -> None:
        """Releases the files and the index: a checkpoint decides how large they are."""
        self._files.clear()
        self._index = replace(self._index, tensors={}, files={})

    def repad(self, padded_rows: Mapping[str, int]) -> None:
        """Lets parameters have more or fewer rows of padding than they were saved with.

        `padded_rows` has the plan's parameters, by pattern; their rows without padding must be the
        same in the checkpoint.
        """
        try:
            setting: Mapping[str, Any] = json.loads(str(self.run.get(PADDED_ROWS, "{}")))
            saved_rows = {str(name): to_natural(rows) for name, rows in setting.items()}
        except DAMAGE:
            raise RunError(
                f"{self.path / INDEX} is damaged: its run's `{PADDED_ROWS}` is no JSON of numbers"
            ) from None
        all_padded_rows = {**saved_rows, **padded_rows}
        agreed_rows = dict[str, int]()
        for name, rows in all_padded_rows.items():
            if saved_rows.get(name, rows) == rows:
                agreed_rows[name] = rows
        self._padded_rows = agreed_rows

    def _is_repadded(self, box: Box) -> bool:
        """Whether the tensor here differs from the plan's in rows of padding alone."""
        rows, *columns = *self._index.tensors[box.key].shape, 0
        wanted_rows, *wanted_columns = *box.shape, 0
        if rows == wanted_rows or columns != wanted_columns:
            return False
        parameter = box.key.rpartition("/")[2]
        for pattern, rows_without_padding in self._padded_rows.items():
            if fnmatchcase(parameter, pattern):
                return rows_without_padding <= min(rows, wanted_rows)
        return False

    def check(self, boxes: Sequence[Box]) -> None:
        """RunError unless the checkpoint has the tensor of each box: whole, of the box's element
        type, and in a shape that can be read as the plan's.
        """
        keys = list(dict.fromkeys(box.key for box in boxes))
        missing = [key for key in keys if key not in self._index.tensors]
        if missing:
            raise RunError(f"{self.path} lacks {quote_first_names(missing)}: {_MODEL}")
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
        if fault := index.find_fault(self._index, keys):
            raise RunError(f"{self.path / INDEX}: {fault}")

    def copies(self, boxes: Iterable[Box]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a part of a checked box and the values to copy into it, for all of the boxes."""
        copies = list[tuple[Tensor, Tensor]]()
        for box in boxes:
            copies.extend(self._copies(box, self._index.tensors[box.key]))
        return copies

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
                    piece = source.get_view(self._tensor(part, entry.dtype))
                    values = piece[shared.within(source.extent)]
                    yield target.get_view(box.tensor)[shared.within(target.extent)], values

    def _rows(self, box: Box, entry: index.Entry) -> Iterator[tuple[Tensor, Tensor]]:
        """Copies for the rows that both have; rows that the plan alone has are padding, and 0."""
        for part in entry.parts:
            if shared := part.extent.overlap(box.extent):
                values = self._tensor(part, entry.dtype)[shared.within(part.extent)]
                yield box.tensor[shared.within(box.extent)], values
        padding = box.tensor[max(0, entry.shape[0] - box.offset[0]) :]
        yield padding, torch.zeros_like(padding)

    def _tensor(self, part: index.Part, dtype: torch.dtype) -> Tensor:
        tensor = self._file(part.file).get(part.name)
        if tensor is None or (tensor.shape, tensor.dtype) != (part.extent.size, dtype):
            path, wanted = self.path / part.file, _kind(part.extent.size, dtype)
            raise RunError(f"{path} has no `{part.name}` that is {wanted}, though {INDEX} says so")
        return tensor

    def _file(self, name: str) -> dict[str, Tensor]:
        if name not in self._files:
            self._files[name] = self._read(name)
        return self._files[name]

    def _read(self, name: str) -> dict[str, Tensor]:
        return tensor_file.read(
            self.path / name, self._index.files[name], hashes=not self._is_checked
        )


def open_saved(saved: Path | Saved) -> Saved:
    """Opens a checkpoint that is not open yet.  RunError."""
    if isinstance(saved, Saved):
        return saved
    return Saved(saved)


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _index_of(path: Path) -> tuple[index.Index, str]:
    """The index of a checkpoint, and a short hash of its text.  RunError."""
    file = path / INDEX
    if not file.exists() and (path / ".metadata").exists():
        how = f"`scalec convert PLAN {path} -o step-NNNNNN` makes a checkpoint of it"
        raise RunError(f"{path} is of torch.distributed.checkpoint: {how}")
    data = index_of(file)
    try:
        parsed_index = index.parse(data)
    except RunError as error:
        raise RunError(f"{file} {error}{describe_format(file)}") from None
    name = folder_name(parsed_index.step)
    if path.name != name:
        raise RunError(f"{path} holds step {parsed_index.step}: it was saved as {name}")
    return parsed_index, blake2b(data, digest_size=6).hexdigest()


def folder_name(step: int) -> str:
    """The name of the checkpoint after `step` steps."""
    return f"step-{step:06d}"
