"""A checkpoint as it is read: any box of any tensor, once the files that hold it have passed their hash.

Non-goals: writing one, and which of several to read (`checkpoint`).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from . import index, payload
from .boxes import Box
from .errors import RunError
from .identity import Identity

INDEX = "index.json"
_SHOWN = 3  # names of a list


class Saved:
    """A whole checkpoint, open for reading.  RunError where it is not what was written.

    Each file is held against its size and hash when the first of its tensors is asked for, whatever part of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = _index_of(path)
        self._files: dict[str, dict[str, Tensor]] = {}

    @property
    def run(self) -> Identity:
        """What is known of the run that saved it."""
        return self._index.run

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by key, whole, without their values: on the device `meta`."""
        entries = self._index.tensors.items()
        return {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries}

    def parameters(self) -> dict[str, Tensor]:
        """Those that are parameters."""
        return {key: tensor for key, tensor in self.tensors().items() if not key.startswith("optimizer/")}

    def fill(self, values: dict[str, Tensor]) -> None:
        """Fills whole tensors by name."""
        boxes = [Box(key, tuple(each.shape), (0,) * each.dim(), each, own=True) for key, each in values.items()]
        self.check(boxes)
        for target, source in self.copies(boxes):
            target.copy_(source)

    def check(self, boxes: Sequence[Box]) -> None:
        """RunError unless each box is of a tensor that is here, of its shape and element type, and whole."""
        keys = dict.fromkeys(box.key for box in boxes)
        if missing := [key for key in keys if key not in self._index.tensors]:
            raise RunError(f"{self.path} lacks {named(missing)}")
        for box in boxes:
            entry = self._index.tensors[box.key]
            saved, wanted = (_kind(of.shape, dtype) for of, dtype in ((entry, entry.dtype), (box, box.tensor.dtype)))
            if saved != wanted:
                raise RunError(f"{self.path}: `{box.key}` is {saved}, but the plan's is {wanted}")
        if fault := index.faults(self._index, keys):
            raise RunError(f"{self.path / INDEX}: {fault}")

    def copies(self, boxes: Iterable[Box]) -> list[tuple[Tensor, Tensor]]:
        """Parts of checked boxes, and what to copy into each: together all of them."""
        return [
            (box.tensor[shared.within(box.extent)], self._tensor(part)[shared.within(part.extent)])
            for box in boxes
            for part in self._index.tensors[box.key].parts
            if (shared := part.extent.overlap(box.extent))
        ]

    def _tensor(self, part: index.Part) -> Tensor:
        path = self.path / part.file
        if part.file not in self._files:
            self._files[part.file] = payload.read(path, self._index.files[part.file])
        found = self._files[part.file].get(part.name)
        if found is None or tuple(found.shape) != part.extent.size:
            raise RunError(f"{path} has no `{part.name}` of shape {list(part.extent.size)}, though {INDEX} says so")
        return found


def named(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _index_of(path: Path) -> index.Index:
    file = path / INDEX
    if not file.exists() and (path / ".metadata").exists():
        raise RunError(f"{path} is of an earlier version, by torch.distributed.checkpoint, and cannot be read")
    try:
        found = index.parsed(file.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}") from None
    except RunError as error:
        raise RunError(f"{file} {error}") from None
    if path.name != folder_name(found.step):
        raise RunError(f"{path} holds step {found.step}: it was saved as {folder_name(found.step)}")
    return found


def folder_name(step: int) -> str:
    """What the checkpoint after so many steps is called."""
    return f"step-{step:06d}"
