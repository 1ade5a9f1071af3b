"""Timing for noisy machines, and tables in Markdown.

Candidates take turns, so that a busy minute slows all of them; ratios are medians over rounds, each
within its round.

Non-goals: nothing asserts a time.  torch is not imported: what a process occupies would show in the
peak memory of its children.
"""

import argparse
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def asked_quick(doc: str | None) -> bool:
    """Whether the command line holds `--quick`; `doc` is the script's own, for --help."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few repetitions: whether it runs, not what it measures",
    )
    return parser.parse_args().quick


def in_turns(candidates: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Results of each candidate in each round, every other round in reverse order; a first
    round warms up.
    """
    results: dict[str, list[T]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name in list(candidates)[:: 1 if number % 2 else -1]:
            result = candidates[name]()
            if number:
                results[name].append(result)
    return results


def ratio(measured: Sequence[float], reference: Sequence[float]) -> str:
    """The median of measured / reference within a round, and its quartiles."""
    ratios = sorted(a / b for a, b in zip(measured, reference, strict=True))
    quarter = len(ratios) // 4
    return f"{median(ratios):.2f}× ({ratios[quarter]:.2f}–{ratios[-1 - quarter]:.2f})"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table under its title."""
    print(markdown(title, columns, rows))


def markdown(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title."""
    lines = [tuple(columns), tuple("-" for _ in columns), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = f"\n{title}\n"
    for number, line in enumerate(lines):
        fill = "-" if number == 1 else " "
        cells = " | ".join(
            cell.ljust(width, fill) for cell, width in zip(line, widths, strict=True)
        )
        text += f"\n| {cells} |"
    return text


def where() -> str:
    """The machine and versions of a measurement."""
    return (
        f"Python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores"
        f" ({platform.machine()})"
    )
