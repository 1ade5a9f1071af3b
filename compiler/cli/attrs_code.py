"""The code of attrs' generated methods, kept from one command to the next.

attrs writes the methods of a class as text, and compiles the text at each start: Python keeps only
the code of files.  Some two hundred classes take a fifth of the time of a small plan's compile.
attrs has no setting for this: its module gets a `compile` that looks the text up first.
"""

import atexit
import marshal
import re
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType
from typing import Any

from ..syntax.user_cache import keep, private_folder

MOST = 2000
"""The most pieces of code in the file; of more, only the ones stay that this process has used."""

Key = tuple[str, str]

# the salt of a class's hash: it differs between processes, and no class needs it to differ
_SALT = re.compile(r"(?<=hash\(\(\n) +-?\d+,")


@cache
def keep_code_of_attrs() -> None:
    """Has attrs compile the methods of classes that are defined from now on once, and not at
    each start.
    """
    folder = private_folder()
    if folder is None:
        return
    codes = KeptCode(folder / f"attrs-{sys.implementation.cache_tag}-{MAGIC_NUMBER.hex()}.marshal")
    maker: Any = import_module("attr._make")
    maker.compile = codes.compile
    atexit.register(codes.save)


class KeptCode:
    """The code of texts, read from a file of the user's cache, which nobody else can write to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._codes: dict[Key, CodeType] = {}
        self._used = set[Key]()
        self._has_new = False
        # there is none yet, or it was cut short
        with suppress(OSError, ValueError, EOFError, TypeError):
            content = marshal.loads(path.read_bytes())
            self._codes = dict(content)

    def compile(self, text: str, filename: str, mode: str) -> CodeType:
        """The code of a text, as the built-in function has it."""
        key = _SALT.sub("", text), filename
        self._used.add(key)
        code = self._codes.get(key)
        if code is None:
            code = compile(text, filename, mode)
            self._codes[key] = code
            self._has_new = True
        return code

    def save(self) -> None:
        """Keeps the code, if any of it is new."""
        if not self._has_new:
            return
        codes = self._codes
        if len(codes) > MOST:
            codes = {key: codes[key] for key in self._used}
        keep(self._path, marshal.dumps(codes))
