"""A folder of torch.distributed.checkpoint, open for reading: safetensors, or torch's own files
with `.metadata`.

A folder is checked to be whole: torch marks no folder of safetensors as finished.
"""

import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import RunError
from ..state.shards import Extent, fault
from . import torch_metadata
from .files import index_of
from .hf_weights import safetensors


class TorchFolder:
    """The tensors of a folder, by key.  RunError where it is none, or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _told(path):
            self._reader, metadata = _opened(path)

        def read_metadata(*_: object, **__: object) -> Metadata:  # `load` asks for it each time
            return metadata

        cast(Any, self._reader).read_metadata = read_metadata
        found = metadata.state_dict_metadata.items()
        self._tensors = {
            key: each for key, each in found if isinstance(each, TensorStorageMetadata)
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by key, without their values: on the device `meta`."""
        return {
            key: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            for key, each in self._tensors.items()
        }

    def read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """The values of tensors that are there, by key."""
        of = {key: self._tensors[key] for key in keys}
        values = {
            key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in of.items()
        }
        with _told(self.path), warnings.catch_warnings(action="ignore"):  # that a process is alone
            cast(Any, dcp).load(values, storage_reader=self._reader, no_dist=True)
        return values

    def check_parts(self, keys: Sequence[str]) -> None:
        """RunError unless the parts of each of these tensors are all of it."""
        for key in keys:
            found = self._tensors[key]
            parts = [Extent(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
            with _told(self.path):
                wrong = fault(tuple(found.size), parts)
            if wrong:
                raise RunError(
                    f"{self.path}: `{key}`: {wrong}; was the save that wrote it cut off?"
                )


def _opened(path: Path) -> tuple[FileSystemReader, Metadata]:
    """The reader for the files in a folder, and what they hold; torch's own, a pickle, is read
    as data.
    """
    if (file := path / ".metadata").exists():
        try:
            return FileSystemReader(path), torch_metadata.parsed(index_of(file))
        except RunError as error:
            raise RunError(f"{file} {error}") from None
    if path.is_dir() and any(path.glob("*.safetensors")):
        safetensors()
        reader = HuggingFaceStorageReader(str(path))
        return reader, reader.read_metadata()
    if not path.exists():
        raise RunError(f"there is no `{path}`")
    within = ": name the folder `sharded` in it" if (path / "sharded").is_dir() else ""
    raise RunError(
        f"{path} is no checkpoint: it has no index.json, no .metadata and no *.safetensors{within}"
    )


@contextmanager
def _told(path: Path) -> Generator[None]:
    """Has a fault of the files be told in a line."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.filename or ''} {error.strerror or error}"
        ) from None
    except (CheckpointException, Exception) as error:
        if isinstance(error, RunError):
            raise
        inner = (
            [each[0] for each in error.failures.values()]
            if isinstance(error, CheckpointException)
            else [error]
        )
        word = re.sub(r"\s+", " ", str(inner[0]))[:120]
        raise RunError(
            f"{path} is damaged ({type(inner[0]).__name__}: {word}): take another checkpoint"
        ) from None
