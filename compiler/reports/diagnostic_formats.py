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
from ..syntax.codes import get_code
from ..syntax.diagnostics import Diagnostic
from ..syntax.fixes import Fix, fixes
from ..syntax.source import Span

VERSION = 1
"""The version of the JSON form, which rises when a field goes or changes its meaning."""

SARIF = "2.1.0"


def as_json(diagnostics: Sequence[Diagnostic]) -> str:
    """A JSON object with a list of the diagnostics.

    A diagnostic that is about a file as a whole has no `range`.
    """
    objects = [_plain(diagnostic) for diagnostic in diagnostics]
    return _to_json({"version": VERSION, "diagnostics": objects})


def _plain(diagnostic: Diagnostic) -> dict[str, Any]:
    notes: list[dict[str, Any]] = []
    for note in diagnostic.notes:
        place = _place(note.span) if note.span else {}
        notes.append({"message": note.text, **place})
    words = {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "label": diagnostic.label,
        "help": diagnostic.help,
    }
    edits = [_place(fix.span) | {"text": fix.text} for fix in fixes(diagnostic)]
    return words | _place(diagnostic.span) | {"notes": notes, "fixes": edits}


def _place(span: Span) -> dict[str, Any]:
    if not span.line:
        return {"file": span.path}
    start = {"line": span.line, "column": span.column}
    end = {"line": span.end_line, "column": span.end_column}
    return {"file": span.path, "range": {"start": start, "end": end}}


def as_sarif(diagnostics: Sequence[Diagnostic]) -> str:
    """A log in the Static Analysis Results Interchange Format, 2.1.0 (OASIS 2020), with the
    rules that were broken.
    """
    codes = sorted({diagnostic.code for diagnostic in diagnostics})
    driver = {
        "name": "scalec",
        "version": __version__,
        "rules": [_rule(code) for code in codes],
    }
    results = [_result(diagnostic, codes.index(diagnostic.code)) for diagnostic in diagnostics]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    schema = (
        f"https://docs.oasis-open.org/sarif/sarif/v{SARIF}/os/schemas/sarif-schema-{SARIF}.json"
    )
    return _to_json({"$schema": schema, "version": SARIF, "runs": [run]})


def _rule(code: str) -> dict[str, Any]:
    level = "warning" if code.startswith("W") else "error"
    return {
        "id": code,
        "shortDescription": {"text": get_code(code).title},
        "fullDescription": {"text": " ".join(get_code(code).text.split())},
        "help": {"text": f"scalec explain {code}"},
        "defaultConfiguration": {"level": level},
    }


def _result(diagnostic: Diagnostic, rule: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": rule,
        "level": diagnostic.severity,
        "message": {"text": full_text(diagnostic)},
        "locations": [_location(diagnostic.span)],
    }
    related: list[dict[str, Any]] = []
    for note in diagnostic.notes:
        if note.span:
            related.append(_location(note.span) | {"message": {"text": note.text}})
    if related:
        result["relatedLocations"] = related
    edits = [_fix(fix) for fix in fixes(diagnostic)]
    if edits:
        result["fixes"] = edits
    return result


def _fix(fix: Fix) -> dict[str, Any]:
    place = _location(fix.span)["physicalLocation"]
    replacement: dict[str, Any] = {"deletedRegion": place["region"]}
    if fix.text:
        replacement["insertedContent"] = {"text": fix.text}
    edit = {"artifactLocation": place["artifactLocation"], "replacements": [replacement]}
    return {"artifactChanges": [edit]}


def _location(span: Span) -> dict[str, Any]:
    path = Path(span.path)
    uri = path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    # the span of a file as a whole has no line, and SARIF counts lines from 1
    if span.line:
        place["region"] = {
            "startLine": span.line,
            "startColumn": span.column,
            "endLine": span.end_line,
            "endColumn": span.end_column,
        }
    return {"physicalLocation": place}


def full_text(diagnostic: Diagnostic, *, placed: bool = False) -> str:
    """The message of a diagnostic with its label, its notes and its help below it.

    A note that has a place of its own is in the text, with its place, only if `placed`.
    """
    lines = [diagnostic.message]
    if diagnostic.label:
        lines = [f"{diagnostic.message}: {diagnostic.label}"]
    for note in diagnostic.notes:
        if not note.span:
            lines.append(f"note: {note.text}")
        elif placed:
            lines.append(f"note: {note.text} ({note.span})")
    if diagnostic.help:
        lines.append(f"help: {diagnostic.help}")
    return "\n".join(lines)


def as_github(diagnostics: Sequence[Diagnostic]) -> str:
    """A line for each diagnostic that GitHub shows at its place in a change: workflow commands
    `error` and `warning`.
    """
    lines: list[str] = []
    for diagnostic in diagnostics:
        message = _escape(full_text(diagnostic, placed=True))
        lines.append(f"::{diagnostic.severity} {_properties(diagnostic)}::{message}\n")
    return "".join(lines)


def _properties(diagnostic: Diagnostic) -> str:
    span = diagnostic.span
    properties: dict[str, Any] = {"file": span.path}
    if span.line:
        properties["line"] = span.line
        properties["endLine"] = span.end_line
        properties["col"] = span.column
        properties["endColumn"] = span.end_column
    properties["title"] = f"{diagnostic.code}: {get_code(diagnostic.code).title}"
    return ",".join(f"{key}={_escape(str(value), ':', ',')}" for key, value in properties.items())


def _escape(text: str, *signs: str) -> str:
    for sign in ("%", "\r", "\n", *signs):
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _to_json(value: dict[str, Any]) -> str:
    return f"{json.dumps(value, indent=2, ensure_ascii=False)}\n"


FORMATS = {"json": as_json, "sarif": as_sarif, "github": as_github}
"""The writers of each `--format` except the text for people."""
