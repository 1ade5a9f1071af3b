"""What a field of a class of `settings` can be: a value, or a section of its own."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import attrs
from attrs import frozen

from ...syntax import tree
from ...syntax.source import Span


@frozen
class Settings:
    """Base of all sections; `spans` says where each setting was set, or the section's head if it was not."""

    SECTION: ClassVar[str]
    spans: Mapping[str, Span] = attrs.field(factory=dict[str, Span], kw_only=True, eq=False, repr=False)


@frozen
class Value:
    """A setting: how its value is read, with PlanError for what does not fit, and how it is shown."""

    doc: str
    read: Callable[[tree.Setting], Any]
    show: Callable[[Any], str]


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
        return self._written(field.variant, field.what.example if isinstance(field.what, Part) else f"{field.key} = …")

    def _written(self, name: str, inside: str) -> str:
        heading = heading_of(self.of)
        name = name or (heading.example if heading else "")
        if self.form == "call":
            return f"{self.of.SECTION} = {name}({inside})"
        return " ".join(filter(None, (self.of.SECTION, name, f"{{ {inside} }}")))


@frozen
class Heading:
    """The name behind the section's kind, `adamw` of `optimizer adamw`, and the field that holds it."""

    field: str
    choices: tuple[str, ...]
    """Empty if it may be any name."""

    @property
    def example(self) -> str:
        """A name that could stand there."""
        return self.choices[0] if self.choices else "NAME"


@frozen
class Field:
    """A field as `schema` sees it."""

    name: str
    what: Value | Part
    variant: str
    """The heading that alone has it, "" if all have."""
    required: bool
    first: bool
    """Whether a call may give it without its name."""

    @property
    def key(self) -> str:
        """What a plan calls it: `group` what the instance has as `groups`."""
        return self.what.of.SECTION if isinstance(self.what, Part) else self.name

    def belongs(self, heading: str) -> bool:
        """Whether sections of this heading have it."""
        return self.variant in ("", heading)


Metadata = dict[str, Any]
WHAT, VARIANT, CHOICES, FIRST = "what", "variant", "choices", "first"


def fields_of(cls: type[Settings]) -> list[Field]:
    """The fields of a class but for its heading, as declared."""
    return [
        Field(
            field.name,
            field.metadata[WHAT],
            field.metadata.get(VARIANT, ""),
            field.default is attrs.NOTHING,
            field.metadata.get(FIRST, False),
        )
        for field in attrs.fields(cls)
        if WHAT in field.metadata
    ]


def heading_of(cls: type[Settings]) -> Heading | None:
    """The heading of a class, if its sections have one."""
    headings = (
        Heading(field.name, field.metadata[CHOICES]) for field in attrs.fields(cls) if CHOICES in field.metadata
    )
    return next(headings, None)


def heading(*choices: str) -> Metadata:
    """The name of the section; without choices, any."""
    return {CHOICES: choices}


def section(of: type[Settings]) -> Metadata:
    """One section in it."""
    return {WHAT: Part(of, "section")}


def sections(of: type[Settings]) -> Metadata:
    """Any number of sections in it."""
    return {WHAT: Part(of, "sections")}


def call(of: type[Settings]) -> Metadata:
    """A section written as a call: `schedule = cosine(warmup=20)`."""
    return {WHAT: Part(of, "call")}


def only(variant: str, metadata: Metadata) -> Metadata:
    """A field that only sections of this heading have."""
    return {**metadata, VARIANT: variant}


def first(metadata: Metadata) -> Metadata:
    """A field that a call gives without its name: `file("rows.csv")`."""
    return {**metadata, FIRST: True}
