"""Symbolic values: what a program would compute, as terms that are equal where they are the same
object.

Non-goals: what makes them (`evaluate`), and what the IR says of them (`forward`, `step`).
"""

import ast
from collections.abc import Sequence
from typing import cast

from attrs import Factory, define, frozen


class Term:
    """`head(args)`; a `Terms` makes one object of it, so two that are computed alike are the same
    one.

    `call` has the function, its arguments and its keywords by name; `attr`, `getitem` and operators
    their operands; `each` is one layer's part of a list, `index` its number; `item` one of several
    results.
    """

    __slots__ = ("args", "head")

    def __init__(self, head: str, args: tuple[object, ...]) -> None:
        self.head, self.args = head, args

    def __str__(self) -> str:
        return self.to_text(3)

    def to_text(self, depth: int) -> str:
        """The term as a reader would write it, but for what is further in."""
        match self.head, self.args:
            case "name", (name,):
                return str(name)
            case _ if not depth:
                return "…"
            case "attr", (of, name):
                return f"{_to_text(of, depth)}.{name}"
            case "call", (function, args, options):
                arguments = [*map(str, _values(args, depth)), *_values(options, depth)]
                return f"{_to_text(function, depth)}({', '.join(arguments)})"
            case "item" | "after" | "param", (of, *_):
                return _to_text(of, depth)
            case _:
                operands = (_to_text(operand, depth - 1) for operand in self.args)
                return f"{self.head}({', '.join(operands)})"

    def __repr__(self) -> str:
        return str(self)


def _to_text(value: object, depth: int) -> str:
    return (
        value.to_text(depth)
        if isinstance(value, Term)
        else str(value)
        if not isinstance(value, tuple | dict)
        else "…"
    )


def _values(several: object, depth: int) -> list[str]:
    """Arguments, or keywords with theirs."""
    if isinstance(several, dict):
        return [
            f"{key}={_to_text(value, depth - 1)}"
            for key, value in cast(dict[object, object], several).items()
        ]
    return [_to_text(value, depth - 1) for value in cast(tuple[object, ...], several)]


class Terms:
    """Makes terms."""

    def __init__(self) -> None:
        self._known: dict[object, Term] = {}

    def __call__(self, head: str, *args: object) -> Term:
        """The term `head(args)`."""
        return self._known.setdefault((head, *map(frozen_key, args)), Term(head, args))

    def name(self, name: str) -> Term:
        """A term known by its name alone: a function, a module, an argument."""
        return self("name", name)


def get_call(value: object, name: str) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """The arguments and keywords of a call of a function; None for any other term."""
    match value:
        case Term(head="call", args=(Term(head="name", args=(str(function),)), args, options)) if (
            function == name
        ):
            return cast(tuple[object, ...], args), cast(dict[str, object], options)
        case _:
            return None


def frozen_key(value: object) -> object:
    """A key that tells values apart, numbers of unlike types too."""
    match value:
        case bool() | int() | float() | str() | None:
            return type(value), value
        case tuple():
            return tuple, *map(frozen_key, cast(tuple[object, ...], value))
        case dict():
            pairs = cast(dict[object, object], value).items()
            return dict, *((frozen_key(key), frozen_key(element)) for key, element in pairs)
        case set():
            return set, frozenset(map(frozen_key, cast(set[object], value)))
        case _:
            return value


@frozen
class Event:
    """A call or an operator as it was run: the term, where, and whether backward recomputes it.

    `block` is set where only a block has the result, `recompute` where backward recomputes the
    whole module.
    """

    term: Term
    node: ast.AST
    block: bool = False
    recompute: object = None

    @property
    def key(self) -> tuple[object, ...]:
        """The part that must be the same in the IR."""
        return self.term, self.block, frozen_key(self.recompute)


@define
class Loop:
    """A loop whose body was run once, on symbols."""

    node: ast.For
    symbol: Term
    domains: tuple[object, ...]
    # what is carried, by name: before the first layer
    begin: dict[str, object] = Factory(dict[str, object])
    carried: dict[str, Term] = Factory(dict[str, Term])  # at the beginning of a layer
    end: dict[str, object] = Factory(dict[str, object])  # at its end
    after: dict[str, Term] = Factory(dict[str, Term])  # after the loop
    log: "list[Event | Loop]" = Factory(list["Event | Loop"])


Log = list[Event | Loop]


def wrong(node: ast.AST, what: str) -> AssertionError:
    """The error that the text of `node` is not what the IR says."""
    return AssertionError(f"emit: line {getattr(node, 'lineno', 0)}: {what}")


def demand(node: ast.AST, holds: bool, what: str) -> None:
    """Raises where the text of `node` is not what the IR says."""
    if not holds:
        raise wrong(node, what)


def within(values: Sequence[object]) -> set[Term]:
    """All terms in some values."""
    terms: set[Term] = set()
    left = [*values]
    while left:
        match left.pop():
            case Term() as term:
                if term not in terms:
                    terms.add(term)
                    left += term.args
            case value:
                several = (
                    cast(dict[object, object], value).values() if isinstance(value, dict) else value
                )
                left += cast(tuple[object, ...], several) if isinstance(value, tuple | dict) else ()
    return terms
