"""What a model is known by: a hash of its dims, parameters and ops, which no mesh, microbatch or precision changes.

Purpose: a run says by it that it goes on with the model that its checkpoint is of.
Non-goals: sizes that a checkpoint's own tensors tell apart, or how parameters begin.
"""

import re
from hashlib import sha256

from ..ir import Program
from ..ir.printer import print_ir

_OF_A_RUN = re.compile(r"(axis|claim|state|bucket|pipeline|held|given|row|dim (batch|microbatches|seq)) ")
_NOT_COMPUTED = re.compile(r" !\S+:\d+|\b(bf16|f16|f32|f64)(?=\[)| ~ \w+\([^)]*\)")
"""Lines of the plan, element types, initial values."""


def known_by(model: Program) -> str:
    """The hash of a model before any placement; empty for a program that has placements."""
    if model.after != "resolve":
        return ""
    _, _, body = print_ir(model).partition(f"program {model.name} after {model.after}\n")
    lines = [_NOT_COMPUTED.sub("", line) for line in body.splitlines() if not _OF_A_RUN.match(line)]
    return sha256("\n".join(lines).encode()).hexdigest()[:12]
