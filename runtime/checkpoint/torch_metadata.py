"""Reads the `.metadata` of torch.distributed.checkpoint, a pickle, without running its code.

Records of torch's own metadata classes become inert stand-ins, whose content is checked.  A pickle
that names anything else is refused.
"""

import io
import pickle
from collections.abc import Mapping
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
from .files import DAMAGE, is_within, to_natural, to_shape
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


def _make_stand_ins() -> dict[tuple[str, str], Any]:
    """The objects that a pickle may name, by module and name.

    They are made anew for each pickle, so that no pickle leaves anything in them.
    """

    def size(sizes: Any) -> tuple[int, ...]:
        return to_shape(sizes)

    def ignore(*_: object) -> None:
        return None

    stand_ins = dict[tuple[str, str], Any]()
    for name in (*_RECORDS, *_STORED):
        stand_ins[f"{_MODULE}.metadata", name] = type(name, (_Record,), {})
    stand_ins[f"{_MODULE}.filesystem", "_StorageInfo"] = type("_StorageInfo", (_Record,), {})
    stand_ins[f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING"] = ignore
    stand_ins["torch.serialization", "_get_layout"] = ignore
    stand_ins["pathlib", "PosixPath"] = ignore
    for name in dir(torch):
        value = getattr(torch, name)
        if isinstance(value, torch.dtype):
            stand_ins["torch", name] = value
    stand_ins["torch", "Size"] = size
    return stand_ins


def _load_stand_ins(data: bytes) -> Any:
    """The stand-ins that a pickle describes.

    Uses pickle's Python code: the C code allocates as much memory as numbers in the pickle say.
    """
    base: Any = vars(pickle)["_Unpickler"]
    stand_ins = _make_stand_ins()

    class Restricted(base):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in stand_ins:
                raise RunError(
                    f"names {module}.{name}, which is none of torch's own metadata: it is not read"
                )
            return stand_ins[module, name]

    return Restricted(io.BytesIO(data)).load()


def parse(data: bytes) -> Metadata:
    """The metadata that torch's reader needs, for tensors alone.

    RunError where the data is damaged, or is something else.
    """
    try:
        metadata = _get_state(_load_stand_ins(data), "Metadata")
        tensors: Any = {}
        for key, record in metadata["state_dict_metadata"].items():
            if tensor := _tensor(record):
                tensors[_text(key)] = tensor
        storage = dict(
            _to_storage_info(key, record) for key, record in metadata["storage_data"].items()
        )
    except _FAULTS as error:
        raise RunError(
            f"is damaged, or no metadata of torch.distributed.checkpoint ({type(error).__name__})"
        ) from None
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())


def _get_state(record: Any, name: str) -> Mapping[str, Any]:
    """The state of a record.  ValueError unless its class has this name."""
    if type(record).__name__ != name or not isinstance(record, _Record):
        raise ValueError
    return cast("Mapping[str, Any]", record.state)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _tensor(record: Any) -> TensorStorageMetadata | BytesStorageMetadata | None:
    """A tensor whose element type parameters may have; None for others, which are never read."""
    if type(record).__name__ == "BytesStorageMetadata":
        return None
    fields = _get_state(record, "TensorStorageMetadata")
    dtype = _get_tuple_state(fields["properties"], "TensorProperties")[0]
    if dtype not in DTYPES.values():
        return None
    parts = list[ChunkStorageMetadata]()
    for record_of_chunk in fields["chunks"]:
        chunk = _get_state(record_of_chunk, "ChunkStorageMetadata")
        offsets, sizes = Size(to_shape(chunk["offsets"])), Size(to_shape(chunk["sizes"]))
        parts.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype), Size(to_shape(fields["size"])), parts)


def _get_tuple_state(record: Any, name: str) -> tuple[Any, ...]:
    state = _get_state(record, name)
    if not isinstance(state, tuple):
        raise ValueError
    return state


def _to_storage_info(key: Any, record: Any) -> tuple[MetadataIndex, _StorageInfo]:
    index, fields = _get_state(key, "MetadataIndex"), _get_state(record, "_StorageInfo")
    path, offset = _text(fields["relative_path"]), index.get("offset")
    if not is_within(path) or fields.get("transform_descriptors"):
        raise ValueError
    offsets = None if offset is None else Size(to_shape(offset))
    place = MetadataIndex(_text(index["fqn"]), offsets)
    return place, _StorageInfo(path, to_natural(fields["offset"]), to_natural(fields["length"]))
