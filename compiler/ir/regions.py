"""Ops, and the regions that nest them."""

from enum import Enum
from typing import Literal

from attrs import field, frozen

from ..syntax.source import Span
from .types import Attr, Value


def _line(span: Span) -> tuple[str, int]:
    return span.file, span.line


def span_field() -> Span:
    """The field for a place in a plan; only its file and line count for equality."""
    return field(eq=_line, repr=False, kw_only=True)


@frozen
class Op:
    """One operation: `outputs = kind(inputs) <attrs>`."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    span: Span = span_field()

    def get(self, key: str) -> Attr:
        """The attribute `key`, which the op's kind declares."""
        return dict(self.attrs)[key]

    def names(self, key: str) -> tuple[str, ...]:
        """The attribute `key` as a tuple of names; empty where it is absent."""
        names = dict(self.attrs).get(key, ())
        assert isinstance(names, tuple), f"{self.kind}: {key} is not a list of names"
        return names


class Enter(Enum):
    """How a value of the enclosing scope enters a region; values that are the same in every
    iteration are just used.
    """

    CARRY = "carry"  # the first iteration's value; later ones take what the one before yielded
    EACH = "each"  # one slice per iteration along the region's dim


class Leave(Enum):
    """How a value of a region's body leaves it."""

    LAST = "last"  # carried: the last iteration's
    STACK = "stack"  # all iterations', stacked along the region's dim
    SUM = "sum"  # the sum over iterations


@frozen
class Arg:
    """A value of a region's body, made from `source` of the enclosing scope."""

    value: Value
    source: str
    enter: Enter


@frozen
class Yield:
    """A value of a region's body that becomes the region's result of the same position."""

    name: str
    leave: Leave


@frozen
class Region:
    """A nested body: `results = kind (args) { body  yield … }`.

    `model` and `step` are outermost, and their arguments are the program's inputs; `forward` and
    `backward` are blocks whose names stay visible after them; `repeat` and `microbatches` run once
    per index of `dim`, `repeat` backwards if `reverse`.
    """

    kind: Literal["model", "step", "microbatches", "forward", "backward", "repeat"]
    body: tuple["Stmt", ...]
    args: tuple[Arg, ...] = ()
    yields: tuple[Yield, ...] = ()
    results: tuple[Value, ...] = ()
    dim: str = ""
    reverse: bool = False
    span: Span = span_field()


Stmt = Op | Region
