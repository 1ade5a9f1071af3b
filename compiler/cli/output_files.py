"""Files that reports are written to: made whole or not at all, and never over what scalec did not write."""

import os
from contextlib import suppress
from pathlib import Path

from .streams import UsageError, cannot_write


def put(path: Path, text: str, form: str, mark: str) -> None:
    """Writes a file over none, or over one with the mark.  Raises UsageError; `form` is the option that names it."""
    check_replaceable(path, text, form, mark)
    replace(path, text, form)


def check_replaceable(path: Path, text: str, form: str, mark: str) -> None:
    """Only files with the mark are replaced.  Rows have no room for it, and are there to be edited: they never are.

    Raises UsageError; `form` is the option that names the file.
    """
    try:
        if not (path.exists() or path.is_symlink()):
            return
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"`{path}` is not a plain file: choose another with --{form}")
        content = path.read_bytes()
    except OSError as error:
        raise cannot_write(path, error, f"; choose another file with --{form}") from error
    if content != text.encode() and mark.encode() not in content[:1000]:
        why = "has other rows" if form == "csv" else "was not written by scalec"
        raise UsageError(f"`{path}` {why}: move it away, or choose another file with --{form}")


def replace(path: Path, text: str, form: str) -> None:
    """Writes a file, all of it or nothing.  Raises UsageError."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with draft.open("xb") as file:
            file.write(text.encode())
        draft.replace(path)
    except OSError as error:
        raise cannot_write(path, error, f"; choose another file with --{form}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
