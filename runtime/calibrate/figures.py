"""The file of hardware's figures, as TOML: of the GPU, the host and the links, and tables of
measured seconds.

Rows of one key are one row, of their mean seconds.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, cast

from .calls import Row

TABLES = {
    "product": ("dtype", "m", "n", "k", "batch"),
    "attention": ("kernel", "width", "length"),
    "moved": ("op", "bytes"),
    "collective": ("op", "ranks", "nodes", "bytes"),
}
"""The tables, and the keys of their rows."""


def text(
    notes: Sequence[str], sections: Mapping[str, Row], links: Sequence[Row], rows: Sequence[Row]
) -> str:
    """The whole file; `notes` are comments at its head."""
    parts = ["\n".join(f"# {note}" for note in notes)]
    parts += ["\n".join([f"[{name}]", *_lines(it)]) for name, it in sections.items() if it]
    parts += ["\n".join(["[[link]]", *_lines(it)]) for it in links]
    parts += ["\n".join([f"[[{table}]]", *_lines(it)]) for table, it in _merged(rows)]
    return "\n\n".join(parts) + "\n"


def _merged(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    found = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        table = row["table"]
        found.setdefault((table, *(row[key] for key in TABLES[table])), []).append(row)
    for (table, *values), each in sorted(found.items(), key=str):
        row = dict(zip(TABLES[table], values, strict=True))
        if table == "attention":
            parts = {
                part: [it["operations"] / it["seconds"] for it in each if it["part"] == part]
                for part in PARTS
            }
            if all(parts.values()):
                yield table, row | {part: geometric_mean(rates) for part, rates in parts.items()}
        else:
            alone = [
                f"alone: {it['alone']:.3g} s"
                for it in each
                if it.get("alone", it["seconds"]) != it["seconds"]
            ]
            source = {"source": alone[0]} if alone else {}
            yield table, row | {"seconds": geometric_mean(it["seconds"] for it in each)} | source


PARTS = ("forward", "backward")


def _lines(it: Row) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in it.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_lines(cast(Row, value)))} }}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value)
