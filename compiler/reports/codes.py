"""`scalec explain CODE`: the meaning of a code, with a wrong and a right plan.

Non-goals: the texts themselves (`codes.toml`).
"""

import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

from ..syntax.diagnostics import CODES


def texts() -> dict[str, Any]:
    """The content of codes.toml: a table for each code, and `plan`, which their words complete."""
    return tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))


def explain_code(code: str) -> str:
    """All that is known of one of CODES, for people."""
    entry = texts()[code]
    parts = [f"{code}: {CODES[code]}", entry["text"]]
    parts += [f"{kind}:\n\n{indent(entry[kind].rstrip(), '  ')}" for kind in ("wrong", "right") if kind in entry]
    return "\n\n".join(parts)
