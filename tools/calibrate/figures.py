"""The file of hardware's figures, as TOML: figures of the GPU, the host and the links, and tables
of measured seconds.

Rows with the same key become one row, with their mean seconds.
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
    for name, section in sections.items():
        if section:
            parts.append(_block(f"[{name}]", section))
    parts += [_block("[[link]]", link) for link in links]
    parts += [_block(f"[[{table}]]", row) for table, row in _merge_rows(rows)]
    return "\n\n".join(parts) + "\n"


def _block(head: str, row: Row) -> str:
    return "\n".join([head, *_lines(row)])


def _merge_rows(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    """One row for each key, with its table, sorted."""
    rows_of_key = dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        table = row["table"]
        key = (table, *(row[name] for name in TABLES[table]))
        rows_of_key.setdefault(key, []).append(row)
    for (table, *values), same_key in sorted(rows_of_key.items(), key=str):
        key_fields = dict(zip(TABLES[table], values, strict=True))
        if table != "attention":
            yield table, key_fields | _seconds(same_key)
        elif rates := _rates(same_key):
            yield table, key_fields | rates


def _rates(rows: Sequence[Row]) -> Row:
    """The rates of attention, forward and backward; empty where one of them is missing."""
    rates: Row = {}
    for part in PARTS:
        rates_of_part = list[float]()
        for row in rows:
            if row["part"] == part:
                rates_of_part.append(row["operations"] / row["seconds"])
        if not rates_of_part:
            return {}
        rates[part] = geometric_mean(rates_of_part)
    return rates


def _seconds(rows: Sequence[Row]) -> Row:
    """The mean seconds of rows, and as the source the seconds of a group alone, if they differ."""
    fields: Row = {"seconds": geometric_mean(row["seconds"] for row in rows)}
    for row in rows:
        if row.get("alone", row["seconds"]) != row["seconds"]:
            fields["source"] = f"alone: {row['alone']:.3g} s"
            break
    return fields


PARTS = ("forward", "backward")


def _lines(row: Row) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in row.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_lines(cast(Row, value)))} }}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value)
