"""A checkpoint's index.json with other content and the right hash, as a program with a mistake
would write it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalec.runtime.checkpoint.index import to_hashed_json

HEAD = ("format", "version", "blake2b")


def change_index(file: Path, change: Callable[[Any], object]) -> None:
    """Changes the content in place, and writes it with its new hash."""
    content = get_content(file.read_bytes())
    change(content)
    file.write_bytes(to_hashed_json(content))


def get_content(data: bytes) -> dict[str, Any]:
    """All of an index but its format, version and hash."""
    read = json.loads(data)
    return {key: value for key, value in read.items() if key not in HEAD}
