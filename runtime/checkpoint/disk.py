"""The disk operations of a save: each method is one system call, before, during or after which a crash may come.

Passed in, so that a test can end the process at every one of them.

Non-goals: reading.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The machine's own file systems.  OSError where one refuses."""

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Appends to an open file."""
        file.write(data)

    def sync(self, descriptor: int) -> None:
        """Has an open file or folder on the disk itself before it returns."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file or folder another name at once: it always has one of the two."""
        old.rename(new)

    def remove(self, folder: Path) -> None:
        """Removes a folder with all in it."""
        shutil.rmtree(folder)


def put(path: Path, chunks: Iterable[bytes | memoryview], disk: Disk) -> None:
    """Writes a new file that is on the disk when this returns."""
    with path.open("wb") as file:
        for chunk in chunks:
            disk.write(file, chunk)
        file.flush()
        disk.sync(file.fileno())


def settle(folder: Path, disk: Disk) -> None:
    """Has the names in a folder on the disk: new files, renamed and removed ones."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
