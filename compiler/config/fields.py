"""The fields of a class of settings, read from the annotations of its attributes.

The type says how a number, a list of numbers or a section is written; `Annotated` adds the kind of
value where the type does not say it, a range, a meaning, and the sections that have the field.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import attrs
from attrs import frozen

from ..syntax.source import Span
from .values import NOT_NEGATIVE, Bound, Value, pair, real, whole


@frozen
class Settings:
    """Base of all sections; `spans` has the place where each setting was set, or the section's
    head if it was not set.
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
    """Only sections of these headings, words of one text, have the field."""

    headings: str


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

    section_class: type[Settings]
    form: Literal["section", "sections", "call"]

    @property
    def example(self) -> str:
        """How such a section begins."""
        return self.get_text("", "…")

    def example_of(self, field: "Field") -> str:
        """How such a section sets one of its fields."""
        if self.form == "call":
            return self.get_text(field.first_variant, f"{field.key}=…")
        if isinstance(field.what, Part):
            return self.get_text(field.first_variant, field.what.example)
        return self.get_text(field.first_variant, f"{field.key} = …")

    def get_text(self, name: str, inside: str) -> str:
        _, heading = heading_of(self.section_class)
        if not name and heading is not None:
            name = heading.example
        if self.form == "call":
            return f"{self.section_class.SECTION} = {name}({inside})"
        return " ".join(filter(None, (self.section_class.SECTION, name, f"{{ {inside} }}")))


@frozen
class Field:
    """A field as `schema` sees it."""

    name: str
    what: Value | Part
    doc: str
    """The meaning of the field; "" for sections."""
    variants: tuple[str, ...]
    """The headings whose sections alone have the field, none if all sections have it."""
    required: bool
    first: bool
    """Whether a call may give the field without its name."""
    every: bool
    """Whether the field is a number of steps, which `every` may come before."""

    @property
    def key(self) -> str:
        """The name of the field in a plan: `group` for the instance's `groups`."""
        if isinstance(self.what, Part):
            return self.what.section_class.SECTION
        return self.name

    def belongs(self, heading: str) -> bool:
        """Whether sections of this heading have the field."""
        return not self.variants or heading in self.variants

    @property
    def first_variant(self) -> str:
        """A heading whose sections have the field, "" if all have it."""
        return self.variants[0] if self.variants else ""


@cache
def fields_of(cls: type[Settings]) -> tuple[Field, ...]:
    """The fields of a class without its heading, in the order of their declaration."""
    fields: list[Field] = []
    for attribute, type_, *marks in _annotations(cls):
        if any(isinstance(mark, Heading) for mark in marks):
            continue
        fields.append(
            Field(
                name=attribute.name,
                what=_what(type_, marks),
                doc=next((mark for mark in marks if isinstance(mark, str)), ""),
                variants=_headings(marks),
                required=attribute.default is attrs.NOTHING,
                first=FIRST in marks,
                every=EVERY in marks,
            )
        )
    return tuple(fields)


def _headings(marks: Iterable[object]) -> tuple[str, ...]:
    """The headings of an `Only`."""
    for mark in marks:
        if isinstance(mark, Only):
            return tuple(mark.headings.split())
    return ()


@cache
def heading_of(cls: type[Settings]) -> tuple[str, Heading | None]:
    """The field that has the name of a section, and the names that it can have; "" and None if
    sections of the class have no name.
    """
    for attribute, _, *marks in _annotations(cls):
        for mark in marks:
            if isinstance(mark, Heading):
                return attribute.name, mark
    return "", None


def _annotations(cls: type[Settings]) -> list[tuple[Any, ...]]:
    """Each attribute with its type and the marks of its annotation."""
    annotations: list[tuple[Any, ...]] = []
    for attribute in attrs.fields(cls):
        if attribute.name == "spans":
            continue
        if get_origin(attribute.type) is Annotated:
            annotations.append((attribute, *get_args(attribute.type)))
        else:
            annotations.append((attribute, attribute.type))
    return annotations


def _what(type_: Any, marks: list[Any]) -> Value | Part:
    """The kind of value, or of section, of a field with this type."""
    inner = next((part for part in get_args(type_) if part is not NoneType), type_)
    match next((mark for mark in marks if isinstance(mark, Value | Bound)), NOT_NEGATIVE), inner:
        case Value() as value, _:
            return value
        case _, type() if issubclass(inner, Settings):
            if CALL in marks:
                return Part(inner, "call")
            # a tuple of sections may be there any number of times
            return Part(inner, "section" if inner is type_ else "sections")
        case bound, _ if get_origin(type_) is tuple:
            return pair(bound)
        case bound, _:
            return real(bound) if inner is float else whole(bound)
