"""The claim of a start on its run's folder: the last start has it, and an earlier one that still trains ends.

torchrun may start ranks anew while others, which it has lost sight of, train on; and so may a person.
"""

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic

from ..errors import RunError

CLAIM = "claim"
"""The file that names the last start."""

_EVERY = 1.0  # seconds between two looks


class Claim:
    """One start's claim, which its first rank keeps."""

    def __init__(self, folder: Path) -> None:
        """Takes it from any earlier start.  OSError."""
        self._file, self.word, self._seen = folder / CLAIM, os.urandom(8).hex(), monotonic()
        draft = self._file.with_suffix(f".{self.word}")
        draft.write_text(self.word)
        draft.replace(self._file)

    def check(self, now: bool = False) -> None:
        """RunError where a later start has it.  Looks once a second, some 20 µs, or `now`.

        A file that cannot be read says nothing: where the folder is gone, so say the saves.
        """
        if not now and monotonic() - self._seen < _EVERY:
            return
        self._seen = monotonic()
        with suppress(OSError):
            self._compare(self._file.read_text())

    def _compare(self, word: str) -> None:
        if word != self.word:
            raise RunError(f"another start of this run has taken over {self._file.parent} ({word}): this one ends")
