"""How well predictions choose among rows of a cell, where some may not fit their GPU.

Rows are ranked by predicted time; those that are said not to fit come last.  Three rules are
compared: time alone; one number, the likely memory with a part for the allocator's fragments; and
the range, by which only rows whose lower end is too large do not fit.  Each is tried with memory
that is predicted some GiB too high as well: a profile that was fitted on one model is off on
others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from statistics import mean
from typing import Any

from attrs import frozen
from measure import table

from .errors import sizes_of
from .rows import Row

EXCESSES = (0, 5, 10, 15)
"""GiB by which memory is predicted too high."""

FRAGMENTS = {"nanotron": 1.09, "torchtitan": 1.03}
"""By framework, the factor of the one number; fitted on the rows that ran out of memory."""


@frozen
class Verdict:
    """The verdict of a rule on a row: it fits, or it lacks memory; neither where it may fit."""

    fits: bool
    lacks: bool


@frozen
class Candidate:
    """A row of a cell: the predicted seconds, last or not, and the measured ones; infinite if
    it ran out of memory.
    """

    is_last: bool
    predicted: float
    measured: float


Rule = Callable[[Row, Mapping[str, Any], float], Verdict]


def verdict_by_time(row: Row, figures: Mapping[str, Any], excess: float) -> Verdict:
    """All rows are taken to fit."""
    return Verdict(fits=True, lacks=False)


def verdict_by_number(row: Row, figures: Mapping[str, Any], excess: float) -> Verdict:
    """A row fits or does not, by its likely memory."""
    needs = (figures["memory_gib"] + excess) * FRAGMENTS.get(row["framework"], 1)
    fits = figures["room_gib"] is None or needs <= figures["room_gib"]
    return Verdict(fits, not fits)


def verdict_by_range(row: Row, figures: Mapping[str, Any], excess: float) -> Verdict:
    """A row fits if its upper end does, and does not if its lower end does not."""
    room = figures["room_gib"]
    low, high = figures["memory_range_gib"]
    return Verdict(room is None or high + excess <= room, room is not None and low + excess > room)


RULES: Mapping[str, Rule] = {
    "time alone": verdict_by_time,
    "one number": verdict_by_number,
    "range": verdict_by_range,
}


def print_by_memory(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints, for each rule and excess, the choices and the wrong verdicts of rows with a cell."""
    known = [row for row in rows if found[row["id"]]["step_s"] is not None]
    lines = list[tuple[str, ...]]()
    for name, rule in RULES.items():
        for excess in EXCESSES if rule is not verdict_by_time else EXCESSES[:1]:
            lines.append((name, f"{excess} GiB", *_line(known, found, rule, excess)))
    if any(row.get("cell") for row in known):
        head = (
            "memory by",
            "too high by",
            "cells",
            *CHOICES,
            *CHOICES,
            "called unfit",
            "called fit",
        )
        table(
            "The fastest row of a cell: rows that ran; with those that ran out of memory; verdicts",
            head,
            lines,
        )


CHOICES = ("in the first 3", "p90")


def _line(
    rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]], rule: Rule, excess: float
) -> Iterator[str]:
    """The cells of a line: choices of both kinds, then verdicts."""
    verdicts = {row["id"]: rule(row, found[row["id"]], excess) for row in rows}
    for column, statuses in (("cell", ("ok",)), ("cell26", ("ok", "oom"))):
        cells = _cells(rows, found, verdicts, column, statuses)
        chosen = [_choice(each) for each in cells]
        if column == "cell":
            yield f"{len(chosen)}"
        yield f"{mean(is_found for is_found, _ in chosen):.1%}" if chosen else ""
        yield _share(sizes_of([lost for _, lost in chosen])[1]) if chosen else ""
    ran, out = (
        [verdicts[row["id"]] for row in rows if row["status"] == status] for status in ("ok", "oom")
    )
    yield f"{sum(verdict.lacks for verdict in ran)} of {len(ran)} that ran"
    yield f"{sum(verdict.fits for verdict in out)} of {len(out)} that ran out"


def _cells(
    rows: Sequence[Row],
    found: Mapping[str, Mapping[str, Any]],
    verdicts: Mapping[str, Verdict],
    column: str,
    statuses: Sequence[str],
) -> list[list[Candidate]]:
    """The candidates of cells that have several, one of which ran at least."""
    cells = defaultdict[tuple[str, str], list[Candidate]](list)
    for row in rows:
        if not row.get(column) or row["status"] not in statuses:
            continue
        measured = float(row["step_s"]) if row["status"] == "ok" and row["step_s"] else inf
        lacks = verdicts[row["id"]].lacks
        candidate = Candidate(lacks, float(found[row["id"]]["step_s"]), measured)
        cells[row["framework"], row[column]].append(candidate)
    return [
        each for each in cells.values() if len(each) > 1 and any(it.measured < inf for it in each)
    ]


def _choice(each: Sequence[Candidate]) -> tuple[bool, float]:
    """Whether the fastest is among the first three, and what the first loses, as a part."""
    ranked = sorted(each, key=lambda it: (it.is_last, it.predicted))
    least = min(it.measured for it in each)
    return least in [it.measured for it in ranked[:3]], ranked[0].measured / least - 1


def _share(part: float) -> str:
    """A part in words; the first of some cells may have run out of memory."""
    return f"{part:.1%}" if part < inf else "out of memory"
