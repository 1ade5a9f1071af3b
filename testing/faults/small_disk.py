"""A disk that is really full."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size: int) -> Generator[bool]:
    """Mounts a file system of `size` bytes at `folder` while entered; False, and nothing done,
    where one may not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mounted = _runs("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield mounted
    finally:
        if mounted:
            _runs("umount", "--lazy", str(folder))


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
