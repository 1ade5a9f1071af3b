"""The JSON Schema of all settings, read off their classes: what `plan.json` has under `settings`."""

from typing import Any

import attrs

from .fields import Field, Part, Settings, fields_of, heading_of
from .settings import Cluster, Flow, Pipelining, Train, Watch
from .values import Selection, Size, record

DIALECT = "https://json-schema.org/draft/2020-12/schema"

SECTIONS = (Cluster, Pipelining, Flow, Train, Watch)
"""The sections of a plan that are settings; `mesh`, `shard` and `names` have rules."""


def settings_schema() -> dict[str, Any]:
    """The schema: a property for each section of a plan, a definition for each class of settings."""
    return {
        "$schema": DIALECT,
        "title": "Settings of a scalec plan",
        "description": "Sections by name, with each setting's meaning, range and default; sizes are in bytes.",
        "type": "object",
        "properties": {section.SECTION: {"$ref": f"#/$defs/{section.__name__}"} for section in SECTIONS},
        "additionalProperties": False,
        "$defs": {cls.__name__: _section(cls) for cls in _classes(SECTIONS)},
    }


def _classes(classes: tuple[type[Settings], ...]) -> dict[type[Settings], None]:
    """Classes, each before those of its parts."""
    found = dict[type[Settings], None]()
    for cls in classes:
        parts = tuple(field.what.of for field in fields_of(cls) if isinstance(field.what, Part))
        found |= {cls: None} | _classes(parts)
    return found


def _section(cls: type[Settings]) -> dict[str, Any]:
    name, heading = heading_of(cls)
    named = {} if heading is None else {name: {"enum": [*heading]} if heading else {"type": "string"}}
    fields = fields_of(cls)
    properties = named | {field.name: _field(cls, field) for field in fields}
    required = (*named, *(field.name for field in fields if field.required))
    return {"description": (cls.__doc__ or "").partition("\n")[0]} | record(properties, *required)


def _field(cls: type[Settings], field: Field) -> dict[str, Any]:
    if isinstance(field.what, Part):
        part = {"$ref": f"#/$defs/{field.what.of.__name__}"}
        return {"type": "array", "items": part} if field.what.form == "sections" else part
    default = attrs.fields_dict(cls)[field.name].default
    value = field.what.schema if default is not None else {"anyOf": [field.what.schema, {"type": "null"}]}
    only = f"; of `{field.variant}` only" if field.variant else ""
    given = {} if field.required else {"default": _plain(default)}
    return {"description": f"{field.doc}{only}. In a plan: {field.what.takes}"} | value | given


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, Selection | Size):
        return attrs.asdict(value)
    return [*value] if isinstance(value, tuple) else value
