"""The ops of a step: the table of `explain time --lines` and its CSV; the critical path, of
`--critical`.
"""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO

from ..analysis.time.critical_path import CriticalPath
from ..analysis.time.op_rows import OpRow
from ..config.units import amount
from .summary import table
from .time import LEAST, seconds

KINDS = ("products", "attention", "memory-bound", "update")

HEADER = (
    *("op", "value", "line", "where", "layers", "runs"),
    *(f"{kind.replace('-', '_')}_s" for kind in KINDS),
    *("links_s", "host_s", "operations", "bytes", "sent_bytes"),
)
"""The columns of the CSV: seconds by kind, on links and of the host, all of a step."""


def lines(ops: Sequence[OpRow]) -> str:
    """A table of ops, the longest first."""
    head = (
        "op",
        "value",
        "line",
        "where",
        "runs",
        "seconds",
        "on links",
        "operations",
        "bytes",
        "sent",
    )
    rows = map(_row, sorted(ops, key=lambda row: -_computes(row) - _links(row)))
    return "\n".join(table([head, *rows], "llllr"))


def as_csv(ops: Sequence[OpRow]) -> str:
    """The ops in the program's order."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in ops:
        kinds = [row.computes.get(kind, 0.0) for kind in KINDS]
        names = (row.kind, row.name, row.line, row.where, row.layers, row.count)
        writer.writerow(
            (*names, *kinds, _links(row), row.issued, row.operations, row.bytes, row.sent)
        )
    return text.getvalue()


def _row(row: OpRow) -> tuple[str, ...]:
    computes, links = _computes(row), _links(row)
    return (
        row.kind,
        row.name,
        row.line,
        row.where,
        f"{row.count:,}",
        _unless_zero(computes, seconds(computes)),
        _unless_zero(links, seconds(links)),
        _unless_zero(row.operations, f"{row.operations:.2e}"),
        _unless_zero(row.bytes, amount(row.bytes)),
        _unless_zero(row.sent, amount(row.sent)),
    )


def _unless_zero(number: float, words: str) -> str:
    """The words for a number; "" for 0."""
    return words if number else ""


def _computes(row: OpRow) -> float:
    return sum(row.computes.values())


def _links(row: OpRow) -> float:
    return sum(row.sends.values())


ABOUT = (
    "slack: by how much longer an op of that line may take before the step does; the least of"
    " all its ops"
)


def critical(path: CriticalPath) -> str:
    """A table by kind and plan line: first the rows on the path, the longest first, then the
    others, the least slack first.
    """
    rows = [("critical path", "seconds", "share", "slack", ""), *_path_rows(path)]
    return "\n".join((*table(rows, "lrrrl"), "", ABOUT))


def _path_rows(path: CriticalPath) -> Iterator[tuple[str, str, str, str, str]]:
    keys = sorted(path.slack, key=lambda key: (-path.on_path.get(key, 0.0), path.slack[key]))
    for kind, line in keys:
        on_path, slack = path.on_path.get((kind, line), 0.0), path.slack[kind, line]
        if on_path >= LEAST * path.seconds:
            yield kind, seconds(on_path), f"{on_path / path.seconds:.0%}", seconds(slack), line
        elif slack >= LEAST * path.seconds:
            yield kind, "", "", seconds(slack), line
