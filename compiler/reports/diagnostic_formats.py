"""Diagnostics as editors and servers read them: JSON, SARIF, GitHub's workflow commands.

Lines and columns count from 1, in characters, and the end is exclusive.  Non-goals: the text for
people (`render`).
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .. import __version__
from ..syntax.diagnostics import CODES, Diagnostic
from ..syntax.fixes import Fix, fixes
from ..syntax.source import Span
from .explain import texts

VERSION = 1
"""The version of the JSON form, which rises when a field goes or changes its meaning."""

SARIF = "2.1.0"


def as_json(found: Sequence[Diagnostic]) -> str:
    """An object with a list of them; a diagnostic of a file as a whole has no `range`."""
    return _written({"version": VERSION, "diagnostics": [_plain(it) for it in found]})


def _plain(it: Diagnostic) -> dict[str, Any]:
    notes = [
        {"message": note.text, **(_place(note.span) if note.span else {})} for note in it.notes
    ]
    said = {
        "code": it.code,
        "severity": it.severity,
        "message": it.message,
        "label": it.label,
        "help": it.help,
    }
    edits = [_place(fix.span) | {"text": fix.text} for fix in fixes(it)]
    return said | _place(it.span) | {"notes": notes, "fixes": edits}


def _place(span: Span) -> dict[str, Any]:
    if not span.line:
        return {"file": span.path}
    start, end = (span.line, span.column), (span.end_line, span.end_column)
    places = ({"line": line, "column": column} for line, column in (start, end))
    return {"file": span.path, "range": dict(zip(("start", "end"), places, strict=True))}


def as_sarif(found: Sequence[Diagnostic]) -> str:
    """A log in the Static Analysis Results Interchange Format, 2.1.0 (OASIS 2020), with the
    rules that were broken.
    """
    codes = sorted({it.code for it in found})
    described = texts() if codes else {}
    driver = {
        "name": "scalec",
        "version": __version__,
        "rules": [_rule(code, described[code]) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(it, codes.index(it.code)) for it in found],
    }
    schema = (
        f"https://docs.oasis-open.org/sarif/sarif/v{SARIF}/os/schemas/sarif-schema-{SARIF}.json"
    )
    return _written({"$schema": schema, "version": SARIF, "runs": [run]})


def _rule(code: str, described: dict[str, str]) -> dict[str, Any]:
    level = "warning" if code.startswith("W") else "error"
    return {
        "id": code,
        "shortDescription": {"text": CODES[code]},
        "fullDescription": {"text": " ".join(described["text"].split())},
        "help": {"text": f"scalec explain {code}"},
        "defaultConfiguration": {"level": level},
    }


def _result(it: Diagnostic, rule: int) -> dict[str, Any]:
    related = [
        _location(note.span) | {"message": {"text": note.text}} for note in it.notes if note.span
    ]
    return {
        "ruleId": it.code,
        "ruleIndex": rule,
        "level": it.severity,
        "message": {"text": full_text(it)},
        "locations": [_location(it.span)],
        **({"relatedLocations": related} if related else {}),
        **({"fixes": edits} if (edits := [_fix(fix) for fix in fixes(it)]) else {}),
    }


def _fix(it: Fix) -> dict[str, Any]:
    place = _location(it.span)["physicalLocation"]
    inserted = {"insertedContent": {"text": it.text}} if it.text else {}
    edit = {
        "artifactLocation": place["artifactLocation"],
        "replacements": [{"deletedRegion": place["region"]} | inserted],
    }
    return {"artifactChanges": [edit]}


def _location(span: Span) -> dict[str, Any]:
    path = Path(span.path)
    uri = path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))
    region = {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": uri},
            **({"region": region} if span.line else {}),
        }
    }


def full_text(it: Diagnostic, *, placed: bool = False) -> str:
    """The message with what is said below it; notes that have places of their own only where
    these are `placed`.
    """
    head = f"{it.message}: {it.label}" if it.label else it.message
    notes = [
        f"note: {note.text}{f' ({note.span})' * bool(note.span)}"
        for note in it.notes
        if placed or not note.span
    ]
    return "\n".join((head, *notes, *([f"help: {it.help}"] if it.help else [])))


def as_github(found: Sequence[Diagnostic]) -> str:
    """A line each that GitHub shows at its place in a change: workflow commands `error` and
    `warning`.
    """
    return "".join(
        f"::{it.severity} {_properties(it)}::{_escaped(full_text(it, placed=True))}\n"
        for it in found
    )


def _properties(it: Diagnostic) -> str:
    span = it.span
    place = {
        "line": span.line,
        "endLine": span.end_line,
        "col": span.column,
        "endColumn": span.end_column,
    }
    given = {
        "file": span.path,
        **(place if span.line else {}),
        "title": f"{it.code}: {CODES[it.code]}",
    }
    return ",".join(f"{key}={_escaped(str(value), ':', ',')}" for key, value in given.items())


def _escaped(text: str, *signs: str) -> str:
    for sign in ("%", "\r", "\n", *signs):
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _written(value: dict[str, Any]) -> str:
    return f"{json.dumps(value, indent=2, ensure_ascii=False)}\n"


FORMATS = {"json": as_json, "sarif": as_sarif, "github": as_github}
"""The forms of `--format`, but for the text."""
