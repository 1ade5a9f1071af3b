"""Errors of predicted steps by group, and the rows that are furthest off."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median, quantiles
from typing import Any

from measure import table

from .batch import Array
from .rows import Row

WORST = 10
"""How many rows are printed that are furthest off."""


def by_group(
    rows: Sequence[Row], seconds: Array | Sequence[float], column: str, title: str = ""
) -> None:
    """Prints errors of rows that have a time by the values of a column, and their means over
    these.
    """
    errors = defaultdict[str, list[float]](list)
    for row, error in _errors(rows, seconds):
        errors[row[column]].append(error)
    if not errors:
        return
    lines = [
        (name, f"{len(each)}", *map(_percent, _summary(each)))
        for name, each in sorted(errors.items())
    ]
    everything = [error for each in errors.values() for error in each]
    means = (mean(column) for column in zip(*map(_summary, errors.values()), strict=True))
    lines.append(("all rows", f"{len(everything)}", *map(_percent, _summary(everything))))
    lines.append((f"mean of each {column}'s", f"{len(errors)}", *map(_percent, means)))
    table(
        f"Step, predicted over measured, less 1{title}",
        (column, "rows", "median", "p90", "bias"),
        lines,
    )


def print_choices(rows: Sequence[Row], seconds: Array | Sequence[float]) -> None:
    """Prints, by framework, how well predictions choose among the rows of a cell, which answer one
    question.

    The rows' fastest is looked for among the first three predicted; the first loses by its own
    measured time.
    """
    cells = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    for row, it in zip(rows, seconds, strict=True):
        if row.get("cell") and row["status"] == "ok" and row["step_s"]:
            cells[row["framework"], row["cell"]].append((float(it), float(row["step_s"])))
    choices = defaultdict[str, list[tuple[bool, float]]](list)
    for (framework, _), each in cells.items():
        if len(each) > 1:
            for group in (framework, "all"):
                choices[group].append(_choice(each))
    lines = [
        (
            name,
            f"{len(each)}",
            _percent(mean(found for found, _ in each)),
            *map(_percent, sizes_of([*lost])),
        )
        for name, each in sorted(choices.items(), key=lambda it: (it[0] == "all", it[0]))
        for _, lost in [zip(*each, strict=True)]
    ]
    if lines:
        table(
            "The fastest row of a cell",
            ("framework", "cells", "in the first 3", "first loses", "p90"),
            lines,
        )


def _choice(each: Sequence[tuple[float, float]]) -> tuple[bool, float]:
    """Whether the fastest is among the first three predicted, and what the first loses, as a
    part.
    """
    least, first = (
        min(measured for _, measured in each),
        [measured for _, measured in sorted(each)[:3]],
    )
    return least in first, first[0] / least - 1


def print_worst(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the rows whose steps are furthest off, with the parts of what is predicted."""
    errors = _errors(rows, [found[row["id"]]["step_s"] for row in rows])
    lines = [
        (row["id"], row["step_s"], _percent(error), ", ".join(_parts(found[row["id"]]["parts"])))
        for row, error in sorted(errors, key=lambda it: -abs(it[1]))[:WORST]
    ]
    if lines:
        table("Furthest off", ("row", "seconds", "error", "predicted"), lines)


def _parts(parts: Mapping[str, float]) -> Iterator[str]:
    whole = sum(parts.values())
    return (f"{name} {seconds:.3g} s" for name, seconds in parts.items() if seconds > whole / 50)


def _errors(rows: Sequence[Row], seconds: Array | Sequence[float]) -> Iterator[tuple[Row, float]]:
    for row, it in zip(rows, seconds, strict=True):
        if row["status"] == "ok" and row["step_s"]:
            yield row, float(it) / float(row["step_s"]) - 1


def _summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """The median and the 90th percentile of their sizes, and their median."""
    return *sizes_of(errors), median(errors)


def sizes_of(errors: Sequence[float]) -> tuple[float, float]:
    """The median and the 90th percentile of their sizes."""
    sizes = sorted(map(abs, errors))
    high = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return median(sizes), high


def _percent(part: float) -> str:
    return f"{part:+.1%}" if part < 0 else f"{part:.1%}"
