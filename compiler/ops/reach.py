"""The positions of a sequence that an op looks at: what a position of its result depends on,
beside its own.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from attrs import frozen

from ..ir import Op, Type


@frozen
class Reach:
    """How far a position of a result looks along the sequence of an operand.

    before, after    how many positions before and after its own; `inf` for all of them
    within_document  whether it sees only what is of its own document
    """

    before: float = 0
    after: float = 0
    within_document: bool = False


ReachOf = Callable[[Sequence[Type], Op], Mapping[int, Reach]]
"""The reach into operands, by their index; operands that an op sees as all ops do are left out."""

PAST = Reach(before=inf)
"""A position and all before it."""
