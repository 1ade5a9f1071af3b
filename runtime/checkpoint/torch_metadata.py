"""Reads the `.metadata` of torch.distributed.checkpoint, a pickle, without running what it says.

Records of torch's own metadata classes become inert stand-ins, whose content is checked; a pickle
that names anything else is refused.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Size
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import RunError
from .files import DAMAGE, is_within, natural, shape
from .hf_weights import DTYPES

_RECORDS = ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
_STORED = ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
_MODULE = "torch.distributed.checkpoint"
_FAULTS = (
    *DAMAGE,
    pickle.UnpicklingError,
    EOFError,
    IndexError,
    OverflowError,
    MemoryError,
    AssertionError,
)


class _Record:
    """A stand-in for an instance: its class has no methods but this one, which keeps the state."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _known() -> dict[tuple[str, str], Any]:
    """The objects that a pickle may name: made anew for each, so that none leaves anything in
    them.
    """

    def size(sizes: Any) -> tuple[int, ...]:
        return shape(sizes)

    records = {
        (f"{_MODULE}.metadata", name): type(name, (_Record,), {}) for name in (*_RECORDS, *_STORED)
    }
    ignored: dict[tuple[str, str], Callable[..., None]] = {
        name: lambda *_: None
        for name in (
            (f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
        )
    }
    dtypes = {
        ("torch", name): each
        for name in dir(torch)
        if isinstance(each := getattr(torch, name), torch.dtype)
    }
    storage = {(f"{_MODULE}.filesystem", "_StorageInfo"): type("_StorageInfo", (_Record,), {})}
    return {**records, **storage, **ignored, **dtypes, ("torch", "Size"): size}


def _loaded(data: bytes) -> Any:
    """The stand-ins that a pickle describes.

    By pickle's Python code: C's trusts the numbers in it with memory.
    """
    base: Any = vars(pickle)["_Unpickler"]
    known = _known()

    class Restricted(base):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in known:
                raise RunError(
                    f"names {module}.{name}, which is none of torch's own metadata: it is not read"
                )
            return known[module, name]

    return Restricted(io.BytesIO(data)).load()


def parsed(data: bytes) -> Metadata:
    """The metadata that torch's reader needs, of tensors alone.

    RunError where it is damaged, or is something else.
    """
    try:
        read = _of(_loaded(data), "Metadata")
        tensors: Any = {
            _text(key): found
            for key, each in read["state_dict_metadata"].items()
            if (found := _tensor(each))
        }
        storage = dict(_stored(key, each) for key, each in read["storage_data"].items())
    except _FAULTS as error:
        raise RunError(
            f"is damaged, or no metadata of torch.distributed.checkpoint ({type(error).__name__})"
        ) from None
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())


def _of(record: Any, name: str) -> Mapping[str, Any]:
    """The state of a record.  ValueError where it is another's."""
    if type(record).__name__ != name or not isinstance(record, _Record):
        raise ValueError
    return cast("Mapping[str, Any]", record.state)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _tensor(record: Any) -> TensorStorageMetadata | BytesStorageMetadata | None:
    """A tensor of an element type that parameters have; None for all else, which is never read."""
    if type(record).__name__ == "BytesStorageMetadata":
        return None
    read = _of(record, "TensorStorageMetadata")
    dtype = _of_tuple(read["properties"], "TensorProperties")[0]
    if dtype not in DTYPES.values():
        return None
    chunks = [_of(each, "ChunkStorageMetadata") for each in read["chunks"]]
    parts = [
        ChunkStorageMetadata(Size(shape(each["offsets"])), Size(shape(each["sizes"])))
        for each in chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype), Size(shape(read["size"])), parts)


def _of_tuple(record: Any, name: str) -> tuple[Any, ...]:
    state = _of(record, name)
    if not isinstance(state, tuple):
        raise ValueError
    return state


def _stored(key: Any, record: Any) -> tuple[MetadataIndex, _StorageInfo]:
    index, read = _of(key, "MetadataIndex"), _of(record, "_StorageInfo")
    path, offset = _text(read["relative_path"]), index.get("offset")
    if not is_within(path) or read.get("transform_descriptors"):
        raise ValueError
    place = MetadataIndex(_text(index["fqn"]), None if offset is None else Size(shape(offset)))
    return place, _StorageInfo(path, natural(read["offset"]), natural(read["length"]))
