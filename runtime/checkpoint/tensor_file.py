"""The safetensors format: written as a stream with a hash, read as mapped memory.

The format is eight bytes of a length, that much JSON, and the tensors' bytes (its README,
huggingface/safetensors).  It is written here because the package wants all tensors in host memory
at once, and a hash would need another pass through the file.  Also, a checkpoint, which every run
saves, so needs nothing but torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import RunError
from .files import DAMAGE, Disk, describe_format, size_of, to_natural, to_shape, write_durably
from .hf_weights import DTYPES

_CHUNK = 1 << 26  # bytes written at a time
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stamp:
    """The size and the hash of a file, which tell whether it is what was written."""

    size: int
    blake2b: str


def write(path: Path, tensors: Mapping[str, Tensor], disk: Disk) -> Stamp:
    """Writes tensors of any device, one after the other, in a new file that is on the disk when
    this returns.
    """
    size, digest = 0, _hash()

    def count_and_hash() -> Iterator[bytes | memoryview]:
        nonlocal size
        for chunk in _stream(tensors):
            size += len(chunk)
            digest.update(chunk)
            yield chunk

    write_durably(path, count_and_hash(), disk)
    return Stamp(size, digest.hexdigest())


def read(path: Path, stamp: Stamp, hashes: bool = True) -> dict[str, Tensor]:
    """The tensors of a file, as views of its mapped memory.  RunError if the file is not, bit for
    bit, what was written.

    The bits are compared only where `hashes` is set; the size always is.
    """
    size = size_of(path)
    if size != stamp.size:
        raise RunError(
            f"{path} has {size} bytes, but {stamp.size} were written{describe_format(path)}"
        )
    data = torch.from_file(str(path), size=size, dtype=torch.uint8)
    if hashes and _hash(_bytes(data)).hexdigest() != stamp.blake2b:
        raise RunError(f"{path} is not what was written: its hash differs")
    try:
        return _views(data)
    except DAMAGE:
        raise RunError(f"{path} is no file of tensors, though its hash is right") from None


def _hash(data: bytes | memoryview = b"") -> blake2b:
    return blake2b(data, digest_size=32)


def _stream(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file: its header, padded to whole words; then all tensors."""
    # so that each tensor is aligned for its element type
    widest_first = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header, offset = dict[str, dict[str, Any]](), 0
    for name, tensor in widest_first.items():
        shape, end = list(tensor.shape), offset + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in widest_first.values():
        content = _bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
        for start in range(0, len(content), _CHUNK):
            yield content[start : start + _CHUNK]


def _views(data: Tensor) -> dict[str, Tensor]:
    """All tensors, by name.  ValueError and the like where the header is none."""
    begin = 8 + int.from_bytes(_bytes(data[:8]), "little")
    header = json.loads(bytes(_bytes(data)[8:begin]))
    return {name: _view(data, begin, fields) for name, fields in header.items()}


def _view(data: Tensor, begin: int, fields: Any) -> Tensor:
    """One tensor, by its fields in the header; offsets are counted from `begin`."""
    dtype, sizes = DTYPES[fields["dtype"]], to_shape(fields["shape"])
    start, stop = (begin + to_natural(offset) for offset in fields["data_offsets"])
    if start % dtype.itemsize or stop > len(data) or stop - start != prod(sizes) * dtype.itemsize:
        raise ValueError
    return data[start:stop].view(dtype).view(sizes)


def _bytes(data: Tensor) -> memoryview:
    """The memory of a flat uint8 tensor on the CPU."""
    return memoryview(cast(Any, data.numpy()))
