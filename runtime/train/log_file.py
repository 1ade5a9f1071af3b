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

    A disk that refuses is told once, and costs the lines, not the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._refused, self._told = folder / NAME, False, False

    def write(self, record: Mapping[str, Any]) -> str:
        """Appends a record; why it could not, the first time, or else ""."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(
                    ("\n" if self._refused and _is_cut(self.path) else "")
                    + json.dumps(record)
                    + "\n"
                )
        except OSError as error:
            self._refused, told, self._told = True, self._told, True
            return (
                ""
                if told
                else f"warning: cannot write to {self.path}: {error.strerror}; its lines are lost"
            )
        self._refused = False
        return ""


def mend(folder: Path, first: int) -> None:
    """Leaves the lines of steps up to `first`; later ones, which the run repeats, go to
    `folder`/log.repeated.jsonl.

    A line that a crash has cut off goes too.
    """
    path = folder / NAME
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [*_up_to(first, lines)]
    stays = {*kept}
    if gone := [line for line in lines if line.strip() and line not in stays]:
        with (folder / REPEATED).open("a", encoding="utf-8") as file:
            file.write("".join(line if line.endswith("\n") else line + "\n" for line in gone))
        made = path.with_suffix(".tmp")
        made.write_text("".join(kept), encoding="utf-8")
        os.replace(made, path)


def _is_cut(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")


def _up_to(first: int, lines: list[str]) -> Iterator[str]:
    """The whole lines of steps up to `first`."""
    for line in lines:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith("\n") and step <= first:
            yield line
