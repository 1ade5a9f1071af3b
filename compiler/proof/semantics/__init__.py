"""The semantics of every op of the IR, as formulas in an arithmetic that is either exact or
float64.

Purpose: the only thing the evaluator knows of ops; shared with nothing that compiles, emits or
runs.  Tests hold each formula and the gradients that follow from it against autograd.
"""

from functools import partial

from . import algebra, attention, dropout, experts, fused, join, loss, norm, step, user
from .call import Call, Semantics
from .vjp import pull_back, vjp

_FAMILIES = algebra, attention, dropout, experts, fused, join, loss, norm, step, user


def _meanings() -> dict[str, Semantics]:
    meanings: dict[str, Semantics] = {}
    for family in _FAMILIES:
        meanings |= family.MEANINGS
    meanings["vjp"] = Semantics(partial(vjp, meanings=dict(meanings)))
    return meanings


MEANINGS = _meanings()
"""By the op's kind."""

__all__ = ["MEANINGS", "Call", "Semantics", "pull_back"]
