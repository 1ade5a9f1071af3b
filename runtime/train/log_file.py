"""The file of a run's log: JSON lines, each step once, whatever ended the runs that wrote it."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAME = "log.jsonl"
REPEATED = "log.repeated.jsonl"
"""Lines of steps that a run did once more after it had gone on from a checkpoint before them."""


class LogFile:
    """Appends records to `folder`/log.jsonl.

    If the disk refuses, the log says so once; the run goes on without these lines.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._refused, self._told = folder / NAME, False, False

    def write(self, record: Mapping[str, Any]) -> str:
        """Appends a record; returns why it could not, the first time, or else ""."""
        line = json.dumps(record) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                if self._refused and _is_cut(self.path):
                    line = "\n" + line
                file.write(line)
        except OSError as error:
            was_told = self._told
            self._refused = self._told = True
            if was_told:
                return ""
            return f"warning: cannot write to {self.path}: {error.strerror}; its lines are lost"
        self._refused = False
        return ""


def mend(folder: Path, first: int) -> None:
    """Keeps the lines of steps up to `first`; moves later ones, which the run repeats, to
    `folder`/log.repeated.jsonl.

    A line that a crash has cut off is moved too.
    """
    path = folder / NAME
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    lines_to_keep = [*_find_lines_up_to(first, lines)]
    to_keep = {*lines_to_keep}
    to_move = [line for line in lines if line.strip() and line not in to_keep]
    if to_move:
        with (folder / REPEATED).open("a", encoding="utf-8") as file:
            for line in to_move:
                file.write(line.removesuffix("\n") + "\n")
        draft = path.with_suffix(".tmp")
        draft.write_text("".join(lines_to_keep), encoding="utf-8")
        os.replace(draft, path)


def _is_cut(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")


def _find_lines_up_to(first: int, lines: list[str]) -> Iterator[str]:
    """The whole lines of steps up to `first`."""
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith("\n") and step <= first:
            yield line
