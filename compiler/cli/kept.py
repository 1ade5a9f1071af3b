"""The cache of results, for later commands of the same user, by a hash of everything that they
depend on.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from ..syntax.package_data import folder as package_folder
from ..syntax.user_cache import keep, private_folder

NO_CACHE = "SCALEC_NO_CACHE"
"""The environment variable that turns the cache off, as `--no-cache` does."""

PACKAGES = ("codegen_templates", "compiler", "formats", "grammar")
"""The parts of scalec that a result may depend on."""


def key_of(*parts: str) -> str:
    """The key of a result that these texts and scalec's own files decide, on this Python and
    numpy.
    """
    texts = [*parts, sys.version, _numpy(), _digest_of_files()]
    return _digest(text.encode(errors="surrogateescape") for text in texts)  # a path may be no text


def _numpy() -> str:
    """The text of numpy's own file of its version: asking its metadata takes 16 ms, and
    importing it more.
    """
    spec = find_spec("numpy")
    assert spec, "kept: no numpy"
    assert spec.origin, "kept: numpy has no file"
    return Path(spec.origin).with_name("version.py").read_text()


def _digest(contents: Iterable[bytes]) -> str:
    digest = sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big"))  # no two lists of parts are the same bytes
        digest.update(content)
    return digest.hexdigest()


@cache
def _digest_of_files() -> str:
    """The digest of scalec's own files, which a process has read as they were when it began."""
    return _digest(path.read_bytes() for path in _files())


class Results:
    """The kept results of one kind; of more than `most` the oldest go."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind, self._most = kind, most

    def find(self, key: str) -> bytes | None:
        """The result of this key; None if there is none."""
        folder = self._folder()
        if folder is None:
            return None
        try:
            return (folder / key).read_bytes()
        except OSError:
            return None

    def keep(self, key: str, content: bytes) -> None:
        """Keeps a result, if there is a place for it."""
        folder = self._folder()
        if folder is None:
            return
        keep(folder / key, content)
        with suppress(OSError):
            self._drop_oldest(folder)

    def _drop_oldest(self, folder: Path) -> None:
        oldest_first = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in oldest_first[: -self._most]:
            path.unlink(missing_ok=True)

    def _folder(self) -> Path | None:
        return None if os.environ.get(NO_CACHE) else private_folder(self._kind)


def _files() -> Iterator[Path]:
    """Scalec's own files, in one order."""
    for package in PACKAGES:
        for path in sorted(package_folder(package).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield path
