"""Files of a corpus: which they are, which are held out, and their tokens, read piece by piece.

Files are read, not mapped: a mapped file that another program cuts short ends the process by
SIGBUS.
"""

import hashlib
import os
import sysconfig
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from ...formats.data import TEXT, address, address_advice, files_of, folders_of, foreign
from ..errors import RunError

MOST_OPEN = 64
"""The most files that a stream has open at a time."""


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that the patterns match, sorted, without empty ones.

    RunError if a pattern matches none.
    """
    paths: set[str] = set()
    for pattern in patterns:
        if address(pattern):
            raise RunError(f"no data: {address_advice(pattern)}")
        files = _standard_library() if pattern == "python_stdlib" else files_of(pattern)
        if not files:
            place = ""
            if os.path.isdir(pattern):
                place = f"; it is a folder: `{os.path.join(pattern, '*')}` are the files in it"
            elif not os.path.isabs(pattern):
                place = f", looked for in {os.getcwd()}"
            raise RunError(f"no data: `{pattern}` matches no file that holds anything{place}")
        paths |= {*files}
    return sorted(paths)


def find_folders(patterns: tuple[str, ...]) -> list[str]:
    """The folders that the patterns match, sorted.  RunError if a pattern matches none."""
    folders: set[str] = set()
    for pattern in patterns:
        if address(pattern):
            raise RunError(f"no data: {address_advice(pattern)}")
        matches = folders_of(pattern)
        if not matches:
            place = "" if os.path.isabs(pattern) else f", looked for in {os.getcwd()}"
            raise RunError(
                f"no data: `{pattern}` is no folder{place}; `scalec data` makes one of own text"
            )
        folders |= {*map(os.path.normpath, matches)}
    return sorted(folders)


def require_own_format(paths: list[str], dtype: torch.dtype) -> None:
    """RunError where a file is known to hold no text, or no raw token ids of this type."""
    name = str(dtype).removeprefix("torch.")
    for path in paths:
        try:
            mistake = foreign(path, name)
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from None
        if mistake:
            kind = "text" if name == TEXT else "tokens"
            anyway = (
                f"to read it as it is, write `data {kind} {{ as_is = on }}` in the plan, or"
                " --data-as-is"
            )
            raise RunError(str(mistake), *mistake.remedy, anyway)


def _standard_library() -> list[str]:
    """The sources of this interpreter's standard library, without installed packages and tests."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    sources: list[str] = []
    for folder, below, files in os.walk(sysconfig.get_path("stdlib")):
        # not entered: installed packages can be vast
        below[:] = [name for name in below if name not in skip]
        sources += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return sources


def split_files(files: list[str], holdout: float) -> tuple[list[str], list[str]]:
    """(training files, validation files), chosen by a hash of each path below the files' common
    folder.

    At least one file is held out, if there are several and holdout is not 0.
    """
    if len(files) < 2 or holdout == 0:
        return files, []
    root = os.path.commonpath(files)

    def path_hash(path: str) -> bytes:
        return hashlib.sha256(os.path.relpath(path, root).encode()).digest()

    shuffled = sorted(files, key=path_hash)
    held_out = set(shuffled[: max(1, round(holdout * len(files)))])
    return [path for path in files if path not in held_out], sorted(held_out)


@dataclass(frozen=True)
class _State:
    """The bytes of a file, and the time of its last change in ns."""

    bytes: int
    changed: int

    @classmethod
    def make(cls, stat: os.stat_result) -> "_State":
        return cls(stat.st_size, stat.st_mtime_ns)


class TokenFiles:
    """Files of tokens of one integer dtype.  At most `MOST_OPEN` of them are open; one thread reads
    them.

    RunError if a file ends within a token, or cannot be read, or is not as it was when this was
    made.
    """

    def __init__(self, paths: list[str], dtype: torch.dtype) -> None:
        self._paths, self.dtype = paths, dtype
        self._states = [_State.make(os.stat(path)) for path in paths]
        # descriptors by the number of a file, the one unused for longest first
        self._open = OrderedDict[int, int]()
        weakref.finalize(self, _close, self._open)
        for path, state in zip(paths, self._states, strict=True):
            _require_whole(path, state.bytes, dtype)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each file."""
        return [state.bytes // self.dtype.itemsize for state in self._states]

    def read(self, number: int, start: int, stop: int) -> Tensor:
        """Tokens start to stop of a file: [stop - start], of the files' dtype."""
        tokens = torch.empty(stop - start, dtype=self.dtype)
        unread, offset = (
            memoryview(cast(Any, tokens.numpy())).cast("B"),
            start * self.dtype.itemsize,
        )
        try:
            file = self._descriptor(number)
            while unread and (count := os.preadv(file, [unread], offset)):
                unread, offset = unread[count:], offset + count
            now = _State.make(os.fstat(file))
        except OSError as error:
            raise RunError(f"cannot read {self._paths[number]}: {error.strerror}") from None
        if unread or now != self._states[number]:
            self._refuse(number, now)
        return tokens

    def _descriptor(self, number: int) -> int:
        """A file's descriptor.  Opens the file if it is not open, and closes the one unused for
        longest if too many are open.
        """
        file = self._open.pop(number, None)
        if file is None:
            file = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
        self._open[number] = file
        if len(self._open) > MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return file

    def _refuse(self, number: int, now: _State) -> NoReturn:
        was = self._states[number].bytes
        sizes = f"{was:,} bytes, written to since"
        if was != now.bytes:
            sizes = f"{was:,} bytes then, {now.bytes:,} now"
        raise RunError(
            f"{self._paths[number]} is not as it was when the run began ({sizes}): a run's"
            " data must not change;"
            " restore the file, then --resume"
        )


def _close(descriptors: OrderedDict[int, int]) -> None:
    for file in descriptors.values():
        os.close(file)


def _require_whole(path: str, size: int, dtype: torch.dtype) -> None:
    """RunError where a file is no whole number of tokens."""
    if size % dtype.itemsize:
        name = str(dtype).removeprefix("torch.")
        width = dtype.itemsize
        raise RunError(
            f"{path} has {size:,} bytes, which are no whole number of tokens: one of {name}"
            f" has {width}"
        )
