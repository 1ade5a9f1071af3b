"""Files of a checkpoint: written durably, and read without trust in their content."""

import os
import shutil
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ...formats.known import get_format_words
from ..errors import RunError, reason

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""The errors that come from text that is no JSON, or JSON of another form."""

LARGEST_INDEX = 1 << 33
"""Bytes: somewhat more than the index of the largest plans has on the most ranks."""

_ELEMENTS = 1 << 56
_DIMS = 64  # the most that torch copies


def size_of(path: Path) -> int:
    """The size in bytes of a file that can be read.

    RunError where it cannot be, and where it has no end: a pipe or a device.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
            return status.st_size
    except OSError as error:
        raise RunError(f"cannot read {reason(error)}") from None
    raise RunError(f"cannot read {path}: it is no file")


def index_of(path: Path) -> bytes:
    """The bytes of an index.  RunError."""
    if size_of(path) > LARGEST_INDEX:
        raise RunError(f"cannot read {path}: it is larger than any index")
    return path.read_bytes()


def cores_of_rank() -> int:
    """The cores of this machine for each of its ranks, at least one."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def describe_format(path: Path) -> str:
    """The format of a file that should have another one, as in `: it is a web page (HTML)`.

    "" where the format is unknown.
    """
    format_name = get_format_words(path)
    if not format_name or format_name.endswith(_EXPECTED_FORMATS):
        return ""
    return f": it is {format_name}"


_EXPECTED_FORMATS = ("JSON document", "JSON lines", "(safetensors)")
"""The ends of the names of the formats that checkpoints and weights have themselves."""


def is_within(name: str) -> bool:
    """Whether a file of this name lies in the folder that names it, or in one below it."""
    path = PurePosixPath(name)
    return (
        name.isprintable()
        and bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
    )


def to_natural(value: Any) -> int:
    """A value of JSON that is a count.  ValueError where it is none."""
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def to_shape(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or its offsets in another, from a list of JSON.

    ValueError, also where no memory could hold such a tensor.
    """
    sizes = tuple(map(to_natural, value))
    if len(sizes) > _DIMS or prod(max(size, 1) for size in sizes) > _ELEMENTS:
        raise ValueError
    return sizes


class Disk:
    """The machine's own file systems.  OSError where one refuses."""

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Appends to an open file."""
        file.write(data)

    def sync(self, descriptor: int) -> None:
        """Returns when an open file or folder is on the disk itself."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file or folder atomically: it always has one of the two names."""
        old.rename(new)

    def remove(self, folder: Path) -> None:
        """Removes a folder with all in it."""
        shutil.rmtree(folder)


def write_durably(path: Path, chunks: Iterable[bytes | memoryview], disk: Disk) -> None:
    """Writes a new file that is on the disk when this returns.  OSError."""
    with naming(path), path.open("wb") as file:
        for chunk in chunks:
            disk.write(file, chunk)
        file.flush()
        disk.sync(file.fileno())


def sync_folder(folder: Path, disk: Disk) -> None:
    """Returns when the names in a folder are on the disk: new, renamed and removed files.

    OSError.
    """
    with naming(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            disk.sync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Gives an OSError the file's name, which an error of a write or a sync lacks."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
