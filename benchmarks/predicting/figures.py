"""Figures of rows by a predictor, and their errors by group."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, quantiles

from measure import table

from scalec.compiler.syntax.diagnostics import PlanError

from .rows import Row, Unsaid, why

Found = dict[str, dict[str, float | str | None]]

RATES = ("bubble_rate",)
"""Figures whose errors are differences; those of all others are parts of what was measured."""


def predicted(
    rows: Iterable[Row], predictor: Callable[[Row], Mapping[str, float]], figures: Sequence[str]
) -> Found:
    """By row's id its figures; where there are none, the reason."""
    found: Found = {}
    for row in rows:
        try:
            found[row["id"]] = {**predictor(row)}
        except (Unsaid, PlanError) as error:
            found[row["id"]] = {**dict.fromkeys(figures), "why": why(error)}
    return found


def print_errors(
    rows: Sequence[Row], found: Found, figures: Sequence[str], group: Callable[[Row], str]
) -> None:
    """Prints the errors of each figure."""
    for figure in figures:
        errors = defaultdict[str, list[float]](list)
        for row in rows:
            value = found[row["id"]][figure]
            if isinstance(value, float) and row.get(figure):
                measured = float(row[figure])
                error = value - measured if figure in RATES else value / measured - 1
                for name in (group(row), "all"):
                    errors[name].append(error)
        print_table(f"{figure}: error", errors)


def print_table(title: str, errors: Mapping[str, Sequence[float]]) -> None:
    """Prints a summary of each group's errors, that of `all` last."""
    lines = [
        (name, *summary(each))
        for name, each in sorted(errors.items(), key=lambda it: (it[0] == "all", it))
        if each
    ]
    table(title, ("", "rows", "median", "p90", "largest", "bias"), lines)


def summary(errors: Sequence[float]) -> tuple[str, ...]:
    """How many there are; their median, 90th percentile and largest size, and their median."""
    sizes = sorted(map(abs, errors))
    high = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return (
        f"{len(errors)}",
        f"{median(sizes):.2%}",
        f"{high:.2%}",
        f"{sizes[-1]:.2%}",
        f"{median(errors):+.2%}",
    )
