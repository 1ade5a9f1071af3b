"""The codes of errors and warnings, each a row of `codes.toml`, which describes their fields."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attrs import field, frozen
from attrs.converters import optional

NAME, CONSTANT = "name", "constant"
WHOLE, PLACELESS = "whole", "placeless"


@frozen
class Code:
    """A kind of mistake, or of warning."""

    title: str
    text: str
    wrong: str = ""
    right: str = ""
    at: str = ""
    target: str = ""
    follows: tuple[str, ...] | None = field(default=None, converter=optional(tuple[str, ...]))
    unused: bool = False
    once_for: str = ""
    leaves: str = ""

    @property
    def place(self) -> str:
        """The words of the example plan that `wrong` and `right` replace."""
        return self.at or self.right


@cache
def get_code(code: str) -> Code:
    """The row of a code, which must have one."""
    texts = _texts_by_code()
    assert code in texts, f"codes.toml has no row for {code}"
    return Code(**tomllib.loads(texts[code]))


def get_codes() -> Mapping[str, Code]:
    """All codes, in the order of their numbers."""
    return {code: get_code(code) for code in _texts_by_code()}


def get_example_plan() -> str:
    """The plan that the wrong and the right words of codes complete."""
    head, *_ = _HEADING.split(_read())
    return tomllib.loads(head)["plan"]


_HEADING = re.compile(r"^\[([EW]\d{4})\]\n", re.MULTILINE)


@cache
def _texts_by_code() -> Mapping[str, str]:
    """The text of each row: a mistake parses its own row alone, for the whole table takes 10 ms."""
    _, *parts = _HEADING.split(_read())
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def _read() -> str:
    return Path(__file__).with_name("codes.toml").read_text(encoding="utf-8")
