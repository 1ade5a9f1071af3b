"""Writes a compiled plan's files, and nothing else's.

Purpose: files appear whole or not at all, only in the folder asked for, and only where nothing or
an earlier output of scalec exists.  Non-goals: what the files say.
"""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import cast

MARK = "Written by scalec"
"""A mark in the opening lines of every program that scalec writes."""


PROGRAM = "train.py"
ACCOUNT = "plan.json"


class OutputError(Exception):
    """The output cannot be written, or would destroy what scalec did not write; no file has
    been left half written.
    """


def write(folder: Path, files: dict[str, str]) -> None:
    """Writes `files`, name → text, into `folder`; files that already say the same are left alone.

    If a program is among them, files that the program before read, and this one does not, are
    removed.  Everything is checked before anything is written.  Raises OutputError.
    """
    try:
        _check_folder(folder)
        for name, text in files.items():
            _check_file(folder / name, text.encode())
        companions = _companions(folder) if PROGRAM in files else []
        stale = [path for path in companions if path.name not in files]
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _replace(folder / name, text.encode())
        for path in stale:
            path.unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(
            f"cannot write `{folder}`: {reason}; choose another folder with -o"
        ) from error


def _check_folder(folder: Path) -> None:
    if folder.is_symlink():
        raise OutputError(f"`{folder}` is a symbolic link: name the folder it leads to with -o")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"`{folder}` is not a folder: choose another with -o")


def _check_file(path: Path, content: bytes) -> None:
    if path.is_symlink():
        raise OutputError(
            f"`{path}` is a symbolic link: remove it, or choose another folder with -o"
        )
    if path.exists() and not (path.is_file() and (_is_ours(path) or path.read_bytes() == content)):
        raise OutputError(
            f"`{path}` was not written by scalec: move it away, or choose another folder with -o"
        )


def _is_ours(path: Path) -> bool:
    if path.suffix == ".csv":
        return _is_known(path)
    if path.suffix == ".json":
        return _get_writer(path).startswith("scalec ")
    with path.open("rb") as file:
        return MARK.encode() in file.read(1000)


def _is_known(path: Path) -> bool:
    """Whether the program beside a file, or the program's account, has the hash of the file."""
    digest = sha256(path.read_bytes()).hexdigest()
    for name in (PROGRAM, ACCOUNT):
        file = path.with_name(name)
        if file.is_file() and _is_ours(file) and digest in file.read_text():
            return True
    return False


def _companions(folder: Path) -> list[Path]:
    """The files that the program in a folder reads, as far as they are as it was written for
    them.
    """
    return [
        path
        for path in folder.glob("*.*")
        if path.suffix in (".csv", ".json", ".py") and path.is_file() and _is_known(path)
    ]


def _get_writer(path: Path) -> str:
    """The value of `written_by` in a JSON file."""
    try:
        content: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # not JSON, or not text at all
        return ""
    if not isinstance(content, dict):
        return ""
    return str(cast("dict[str, object]", content).get("written_by", ""))


def _replace(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with draft.open("xb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
