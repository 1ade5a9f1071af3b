"""The user's cache folder, where work that has been done is kept from one command to the next."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile


def private_folder(name: str = "") -> Path | None:
    """The cache folder, or the folder `name` in it.

    None unless this user alone can write to it: its readers trust its content.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = base / "scalec"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = cache / name
        folder.mkdir(mode=0o700, exist_ok=True)
        is_private = _is_private(cache) and _is_private(folder)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    return folder if is_private else None


def _is_private(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def keep(path: Path, content: bytes) -> None:
    """Writes a file of the cache, whole or not at all; on a full disk the next command only
    takes longer.
    """
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as draft:
            draft.write(content)
        Path(draft.name).replace(path)
    except OSError:
        return
