"""The cache of proofs, for later commands.

A proof depends on the IR, before any placement and after the last pass, and on scalec's own code.
A proof that failed is not kept.
"""

import json
import re
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve

from ..analysis.certificate import Proof
from ..ir.printer import print_ir
from .kept import Results, key_of

if TYPE_CHECKING:
    from ..ir import Program

PROOFS = Results("proofs", most=1000)  # of less than a kilobyte each


def proof_key(program: "Program", model: "Program") -> str:
    """The key of a program's proof."""
    return key_of(_without_spans(model), _without_spans(program))


def find(key: str) -> Proof | None:
    """The kept proof of this key, which says that it was kept; None where there is none."""
    text = PROOFS.find(key)
    if text is None:
        return None
    try:
        content: dict[str, Any] = json.loads(text)
        content["meshes"] = tuple(content["meshes"])
        content["trusted"] = tuple(content["trusted"])
        return evolve(Proof(**content), kept=True)
    except (ValueError, TypeError, KeyError):
        return None  # cut short by a crash: the proof is evaluated


def keep(key: str, proof: Proof) -> Proof:
    """Keeps a proof, and returns it."""
    PROOFS.keep(key, json.dumps(asdict(proof)).encode())
    return proof


def _without_spans(program: "Program") -> str:
    """IR text without the places of ops in the plan: a comment added to the plan moves these
    alone.
    """
    return re.sub(r" ![^ ]+:\d+(?=$| \{$)", "", print_ir(program), flags=re.MULTILINE)
