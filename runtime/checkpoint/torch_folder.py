"""A folder of torch.distributed.checkpoint, open for reading: safetensors, or torch's own files
with `.metadata`.

The reader checks that a folder is whole: torch marks no folder of safetensors as finished.
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
    """The tensors of a folder, by key.  RunError where it is no checkpoint, or is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _report_faults(path):
            self._reader, metadata = _open_reader(path)

        def read_metadata(*_: object, **__: object) -> Metadata:  # `load` asks for it each time
            return metadata

        cast(Any, self._reader).read_metadata = read_metadata
        entries = metadata.state_dict_metadata.items()
        self._tensors = dict[str, TensorStorageMetadata]()
        for key, entry in entries:
            if isinstance(entry, TensorStorageMetadata):
                self._tensors[key] = entry

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by key, without their values: on the device `meta`."""
        tensors = dict[str, Tensor]()
        for key, entry in self._tensors.items():
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        return tensors

    def read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """The values of tensors that are there, by key."""
        values = dict[str, Tensor]()
        for key in keys:
            entry = self._tensors[key]
            values[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        # torch warns that no process group is set up
        with _report_faults(self.path), warnings.catch_warnings(action="ignore"):
            cast(Any, dcp).load(values, storage_reader=self._reader, no_dist=True)
        return values

    def check_parts(self, keys: Sequence[str]) -> None:
        """RunError unless the parts of each of these tensors are all of it."""
        for key in keys:
            entry = self._tensors[key]
            parts = [Extent(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            with _report_faults(self.path):
                gap = fault(tuple(entry.size), parts)
            if gap:
                raise RunError(f"{self.path}: `{key}`: {gap}; was the save that wrote it cut off?")


def _open_reader(path: Path) -> tuple[FileSystemReader, Metadata]:
    """The reader for the files in a folder, and their metadata.

    Torch's own metadata is a pickle, which is read as data.
    """
    if (file := path / ".metadata").exists():
        try:
            return FileSystemReader(path), torch_metadata.parse(index_of(file))
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
def _report_faults(path: Path) -> Generator[None]:
    """Turns any fault of the files into a RunError of one line."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.filename or ''} {error.strerror or error}"
        ) from None
    except (CheckpointException, Exception) as error:
        if isinstance(error, RunError):
            raise
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            failures_of_ranks = [*error.failures.values()]
            cause = failures_of_ranks[0][0]
        word = re.sub(r"\s+", " ", str(cause))[:120]
        raise RunError(
            f"{path} is damaged ({type(cause).__name__}: {word}): take another checkpoint"
        ) from None
