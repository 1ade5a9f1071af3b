"""The signature that a plan's `op` gives a function, with the dims and numbers of one call."""

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

Sizes = dict[str, int]


def _as_tuples(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in rows)


def _as_sizes(cases: Sequence[Any]) -> tuple[Sizes, ...]:
    return tuple(dict(case) for case in cases)


@frozen
class Signature:
    """The tensors, numbers and positions that a function takes, and the results that it gives.

    operands   the dims of each tensor that it takes; `names` has the name of each
    gives      the dims of each result
    along      the dims along which it works slice by slice
    linear     the operands in which it is linear, each alone, by number
    constants  the numbers that it takes after its tensors
    positions  (keyword, dim): the function takes its positions along the dim by this keyword
    causal     the dim along which a position of the results depends on no later one; "" for none
    dtype      the element type of the call in the plan, in torch's words
    cases      sizes of all dims; each case is tried
    instead    the sizes to try where the function cannot be called with those of a case
    """

    function: str
    names: tuple[str, ...] = field(converter=tuple)
    operands: tuple[tuple[str, ...], ...] = field(converter=_as_tuples)
    gives: tuple[tuple[str, ...], ...] = field(converter=_as_tuples)
    along: tuple[str, ...] = field(converter=tuple)
    linear: tuple[int, ...] = field(converter=tuple)
    constants: tuple[float, ...] = field(converter=tuple)
    positions: tuple[tuple[str, ...], ...] = field(converter=_as_tuples)
    causal: str
    dtype: str
    cases: tuple[Sizes, ...] = field(converter=_as_sizes)
    instead: Sizes = field(converter=dict)

    @property
    def name(self) -> str:
        """The function's name in its module."""
        return self.function.partition(":")[2]

    @property
    def module(self) -> str:
        """The name of its module."""
        return self.function.partition(":")[0]


def read_signature(fields: dict[str, Any]) -> Signature:
    """The signature that JSON has the fields of."""
    return Signature(**fields)
