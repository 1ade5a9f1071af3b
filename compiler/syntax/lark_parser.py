"""Parsers made from `scalec.grammar`, their LALR tables cached for each user.

Making a table takes a quarter of a second, loading it a few milliseconds.
"""

from hashlib import sha256
from typing import Any

from lark import Lark, Transformer

from .package_data import folder
from .user_cache import private_folder


def parser(name: str, builder: Transformer[Any, Any], *, placeholders: bool = False) -> Lark:
    """The parser of grammar `name`, which calls a method of `builder` for each rule, bottom up.

    With `placeholders` the method gets None for each optional part that is left out of the rule.
    """
    with (folder("grammar") / f"{name}.lark").open(encoding="utf-8") as file:
        return Lark(
            file,  # and not its text, since its imports are relative to it
            parser="lalr",
            strict=True,
            maybe_placeholders=placeholders,
            transformer=builder,
            cache=_cache_file(name),
        )


def _cache_file(name: str) -> str | bool:
    """The file of a table; False where there is no safe place for it.

    A table can run code when it is loaded, so others must not be able to write it.
    """
    cache = private_folder()
    if not cache:
        return False
    return str(cache / f"{name}-{_digest()}.table")


def _digest() -> str:
    """A hash of all grammars: lark compares a table with the imports that it was made from,
    whatever folder these were in, so a table of other grammars needs another name.
    """
    texts = (path.read_bytes() for path in sorted(folder("grammar").glob("*.lark")))
    return sha256(b"".join(texts)).hexdigest()[:16]
