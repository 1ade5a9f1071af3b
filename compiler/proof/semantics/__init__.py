"""The semantics of every op of the IR, as formulas in an arithmetic that is either exact or float64.

Purpose: the only thing the evaluator knows of ops; shared with nothing that compiles, emits or runs.  Tests hold each
formula and each gradient against autograd.
"""

from . import (
    algebra,
    attention,
    dropout,
    embedding,
    experts,
    fused,
    join,
    loss,
    norm,
    parts,
    pointwise,
    reduce,
    step,
    user,
)
from .call import Call, Semantics
from .vjp import vjp

_OPS: dict[str, Semantics] = {
    **algebra.MEANINGS,
    **attention.MEANINGS,
    **dropout.MEANINGS,
    **embedding.MEANINGS,
    **experts.MEANINGS,
    **fused.MEANINGS,
    **join.MEANINGS,
    **loss.MEANINGS,
    **norm.MEANINGS,
    **parts.MEANINGS,
    **pointwise.MEANINGS,
    **reduce.MEANINGS,
    **step.MEANINGS,
    **user.MEANINGS,
}
MEANINGS = {**_OPS, "vjp": Semantics(lambda c: vjp(c, _OPS))}
"""By the op's kind."""

__all__ = ["MEANINGS", "Call", "Semantics"]
