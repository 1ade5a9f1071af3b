"""Programs that are wrong in one place, each as a programmer could have written it.

Purpose: every mistake of a list, at every place of the step where it can be made; the verifier must
find them all.  Not made: mistakes that by construction do nothing, such as one in a group of one
rank, or a maximum taken twice; and anything done to I→R and R→I, which do nothing (what I→R means
for gradients is a P→I in backward, which is mutated).  Non-goals: whether a mutant is found
(`audit`), and by which means; mutants of types, which every pass checks.
"""

from collections.abc import Iterator

from ....compiler.ir import Program
from . import buckets, coercions, documents, dropout, regions, stages, step
from .chunks import chunk_mutants
from .edits import Edit, Mutant
from .rows import row_mutants

FAMILIES: dict[str, Edit] = {
    **coercions.FAMILIES,
    **regions.FAMILIES,
    **step.FAMILIES,
    **documents.FAMILIES,
    **dropout.FAMILIES,
    **buckets.FAMILIES,
    **stages.FAMILIES,
}
"""By what goes wrong: all wrong programs of the kind."""


def mutants(program: Program) -> Iterator[Mutant]:
    """All mutants of a program after the last pass, but those of its rows and chunks, as they
    are asked for.
    """
    for family, wrong in FAMILIES.items():
        for what, span, mutated in wrong(program):
            yield Mutant(family, what, str(span), mutated)


__all__ = ["FAMILIES", "Mutant", "chunk_mutants", "mutants", "row_mutants"]
