"""Proofs kept from one command to the next, by everything that they depend on.

A proof is a function of the IR, before any placement and after the last pass, and of scalec's own code.  Its key is a
hash of these.  A proof that failed is not kept.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve

from ..analysis.certificate import Proof
from ..ir.printer import print_ir
from ..syntax.user_cache import private_folder

if TYPE_CHECKING:
    from ..ir import Program

NO_CACHE = "SCALEC_NO_CACHE"
"""The environment variable that has every proof evaluated, as `--no-cache` does."""

MOST = 1000
"""So many proofs are kept; the oldest ones go first.  One takes less than a kilobyte."""


def key_of(program: "Program", model: "Program") -> str:
    """The key of a program's proof."""
    digest = sha256()
    for text in (_without_spans(model), _without_spans(program), sys.version, version("numpy")):
        _add(digest, text.encode())
    for path in _code():
        _add(digest, path.read_bytes())
    return digest.hexdigest()


def _without_spans(program: "Program") -> str:
    """IR text without the places of ops in the plan: a comment added to the plan moves these alone."""
    return re.sub(r" ![^ ]+:\d+(?=$| \{$)", "", print_ir(program), flags=re.MULTILINE)


def find(key: str) -> Proof | None:
    """The kept proof of this key, which says that it was kept; None where there is none."""
    folder = _folder()
    if folder is None:
        return None
    try:
        content: dict[str, Any] = json.loads((folder / f"{key}.json").read_bytes())
        content["meshes"] = tuple(content["meshes"])
        content["trusted"] = tuple(content["trusted"])
        return evolve(Proof(**content), kept=True)
    except (OSError, ValueError, TypeError, KeyError):
        return None  # none, or cut short by a crash: the proof is evaluated


def keep(key: str, proof: Proof) -> Proof:
    """Keeps a proof, if there is a place for it, and returns it."""
    folder = _folder()
    if folder is None:
        return proof
    with suppress(OSError):  # a full disk costs nothing but time
        with NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump(asdict(proof), file)
        Path(file.name).replace(folder / f"{key}.json")
        _drop_oldest(folder)
    return proof


def _drop_oldest(folder: Path) -> None:
    kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in kept[:-MOST]:
        path.unlink(missing_ok=True)


def _folder() -> Path | None:
    return None if os.environ.get(NO_CACHE) else private_folder("proofs")


def _code() -> Iterator[Path]:
    """The files of the compiler, in one order."""
    yield from sorted(Path(__file__).parents[1].rglob("*.py"))


def _add(digest: Any, content: bytes) -> None:
    """Adds a part with its length, so that no two lists of parts are the same bytes."""
    digest.update(len(content).to_bytes(8, "big"))
    digest.update(content)
