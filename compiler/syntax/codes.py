"""The codes of errors and warnings, each a row of `codes.toml`, which describes their fields."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attrs import field, frozen
from attrs.converters import optional
from attrs.validators import in_

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
    once_for: str = field(default="", validator=in_(("", NAME, CONSTANT)))
    leaves: str = field(default="", validator=in_(("", WHOLE, PLACELESS)))

    @property
    def place(self) -> str:
        """The words of the example plan that `wrong` and `right` replace."""
        return self.at or self.right


def get_code(code: str) -> Code:
    """The row of a code, which must have one."""
    codes = get_codes()
    assert code in codes, f"codes.toml has no row for {code}"
    return codes[code]


@cache
def get_codes() -> Mapping[str, Code]:
    """All codes, in the order of their numbers."""
    rows = {key: row for key, row in _read().items() if key != _PLAN}
    return {code: Code(**row) for code, row in rows.items()}


def get_example_plan() -> str:
    """The plan that the wrong and the right words of codes complete."""
    return _read()[_PLAN]


_PLAN = "plan"


@cache
def _read() -> dict[str, Any]:
    """The table, which is read when the first mistake is found: a right plan needs none of it."""
    return tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))
