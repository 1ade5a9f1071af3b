"""The fields of a class of settings, read from the annotations of its attributes.

The type says how a number, a list of numbers or a section is written; `Annotated` adds the kind of
value where the type does not say it, a range, a meaning, and which sections have the field.
"""

from collections.abc import Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import attrs
from attrs import frozen

from ..syntax.source import Span
from .values import NOT_NEGATIVE, Bound, Value, pair, real, whole


@frozen
class Settings:
    """Base of all sections; `spans` says where each setting was set, or the section's head if
    it was not.
    """

    SECTION: ClassVar[str]
    spans: Mapping[str, Span] = attrs.field(
        factory=dict[str, Span], kw_only=True, eq=False, repr=False
    )


# ---- annotations


class Heading(tuple[str, ...]):
    """The name after the section's kind, `adamw` of `optimizer adamw`: one of these, or any if
    there are none.
    """

    @property
    def example(self) -> str:
        """A possible name."""
        return self[0] if self else "NAME"


@frozen
class Only:
    """Only sections of this heading have the field."""

    heading: str


FIRST = object()
"""A call gives the field without its name: `file("rows.csv")`."""

EVERY = object()
"""The field is a number of steps: `copies every 100`, or with `=`."""

CALL = object()
"""The section is written as a call: `schedule = cosine(warmup=20)`."""


# ---- fields


@frozen
class Part:
    """A section within the section, any number of them, or one that is written as a call."""

    of: type[Settings]
    form: Literal["section", "sections", "call"]

    @property
    def example(self) -> str:
        """How such a section begins."""
        return self._written("", "…")

    def example_of(self, field: "Field") -> str:
        """How such a section has one of its fields."""
        if self.form == "call":
            return self._written(field.variant, f"{field.key}=…")
        return self._written(
            field.variant,
            field.what.example if isinstance(field.what, Part) else f"{field.key} = …",
        )

    def _written(self, name: str, inside: str) -> str:
        _, heading = heading_of(self.of)
        name = name or (heading.example if heading is not None else "")
        if self.form == "call":
            return f"{self.of.SECTION} = {name}({inside})"
        return " ".join(filter(None, (self.of.SECTION, name, f"{{ {inside} }}")))


@frozen
class Field:
    """A field as `schema` sees it."""

    name: str
    what: Value | Part
    doc: str
    """Its meaning; "" for sections."""
    variant: str
    """The heading that alone has it, "" if all have."""
    required: bool
    first: bool
    """Whether a call may give it without its name."""
    every: bool
    """Whether it is a number of steps, which `every` may come before."""

    @property
    def key(self) -> str:
        """Its name in a plan: `group` for the instance's `groups`."""
        return self.what.of.SECTION if isinstance(self.what, Part) else self.name

    def belongs(self, heading: str) -> bool:
        """Whether sections of this heading have it."""
        return self.variant in ("", heading)


@cache
def fields_of(cls: type[Settings]) -> tuple[Field, ...]:
    """The fields of a class but for its heading, as declared."""
    return tuple(
        Field(
            attribute.name,
            _what(of, marks),
            next((mark for mark in marks if isinstance(mark, str)), ""),
            next((mark.heading for mark in marks if isinstance(mark, Only)), ""),
            attribute.default is attrs.NOTHING,
            FIRST in marks,
            EVERY in marks,
        )
        for attribute, of, *marks in _annotations(cls)
        if not any(isinstance(mark, Heading) for mark in marks)
    )


@cache
def heading_of(cls: type[Settings]) -> tuple[str, Heading | None]:
    """The field that has the name of a section, and the names that it can have; None if its
    sections have none.
    """
    headings = (
        (attribute.name, mark)
        for attribute, _, *marks in _annotations(cls)
        for mark in marks
        if isinstance(mark, Heading)
    )
    return next(headings, ("", None))


def _annotations(cls: type[Settings]) -> list[tuple[Any, ...]]:
    """Each attribute with its type and what is said of it besides."""
    return [
        (
            attribute,
            *(
                get_args(attribute.type)
                if get_origin(attribute.type) is Annotated
                else (attribute.type,)
            ),
        )
        for attribute in attrs.fields(cls)
        if attribute.name != "spans"
    ]


def _what(of: Any, marks: list[Any]) -> Value | Part:
    inner = next((part for part in get_args(of) if part is not NoneType), of)
    match next((mark for mark in marks if isinstance(mark, Value | Bound)), NOT_NEGATIVE), inner:
        case Value() as value, _:
            return value
        case _, type() if issubclass(inner, Settings):
            return Part(
                inner, "call" if CALL in marks else "section" if inner is of else "sections"
            )
        case bound, _ if get_origin(of) is tuple:
            return pair(bound)
        case bound, _:
            return real(bound) if inner is float else whole(bound)
