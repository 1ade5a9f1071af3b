"""`.venv/bin/python benchmarks/left_out.py ROWS.csv [--factors]`: errors of predicted steps that no
fit has seen.

For each source of published steps, profiles and shared constants are fitted to all other sources,
and its rows are predicted by them.  Printed are the errors by source, and those of pure data
parallelism by how many ranks there are.  `--factors` holds each fitted number at its prior, one
after the other, and prints by how much the errors grow: a number whose errors do not grow stands
for nothing that these rows tell.

RESULTS.md has these tables.  Non-goals: the fit (`fit_profiles`).
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
from attrs import evolve
from fit_profiles import CONSTANTS, SPREAD, Fit, fit_of, left_out, weights
from measure import table
from predicting.batch import Array
from predicting.errors import by_group
from predicting.plans import degree
from predicting.rows import Row, read
from predicting.training import read_work

DATA_RANKS = ((2, 32), (33, 127), (128, 1 << 20))
"""From how many ranks to how many, of pure data parallelism."""

HELD = 1e-4
"""How far a number that is held may be from its prior, one standard deviation of its logarithm."""


def main() -> None:
    parser = ArgumentParser(description=__doc__, prog="left_out.py")
    parser.add_argument("rows", type=Path)
    parser.add_argument(
        "--clusters", type=Path, help="their networks; unset, clusters.csv beside the rows"
    )
    parser.add_argument(
        "--factors", action="store_true", help="what each number is worth; takes minutes"
    )
    options = parser.parse_args()
    clusters = read(options.clusters or options.rows.with_name("clusters.csv"))
    timed = [row for row in read(options.rows) if row["status"] == "ok" and row["step_s"]]
    work = read_work(timed, {row["cluster"]: row for row in clusters})
    fit = fit_of(work.batch)
    fitted = get_best(fit, work.rows)
    unseen = left_out(fit, work.rows, "source", fitted)
    by_group(work.rows, unseen, "source", ", each source left out")
    print_data_parallel(work.rows, unseen)
    if options.factors:
        print_factors(fit, work.rows, unseen, fit.predicted(fitted))


def get_best(fit: Fit, rows: Sequence[Row]) -> Array:
    """The numbers that fit all rows best."""
    sources = np.array([row["source"] for row in rows])
    return fit.best(weights(sources, np.ones(len(sources), bool)))


def print_data_parallel(rows: Sequence[Row], seconds: Array) -> None:
    """Prints errors of rows whose ranks all have other samples, by how many ranks there are, by
    source.
    """
    for first, last in DATA_RANKS:
        chosen = [
            at
            for at, row in enumerate(rows)
            if is_data_parallel(row) and first <= degree(row, "dp") <= last
        ]
        title = (
            f", {first} to {last} ranks of dp alone"
            if last < DATA_RANKS[-1][1]
            else f", from {first} ranks on"
        )
        by_group([rows[at] for at in chosen], [seconds[at] for at in chosen], "source", title)


def is_data_parallel(row: Row) -> bool:
    """Whether a row has no other parallelism than that of data."""
    return all(degree(row, axis) == 1 for axis in ("tp", "pp", "cp"))


def print_factors(fit: Fit, rows: Sequence[Row], unseen: Array, fitted: Array) -> None:
    """Prints the mean of sources' median errors with each number held at its prior: of a fit to
    others, and to all.
    """
    lines = [
        ("none", *(f"{get_mean_error(fit, rows, seconds):.2%}" for seconds in (unseen, fitted)), "")
    ]
    for name in (*SPREAD, *CONSTANTS):
        held = get_held(fit, name)
        best = get_best(held, rows)
        both = left_out(held, rows, "source", best), held.predicted(best)
        errors = (f"{get_mean_error(fit, rows, seconds):.2%}" for seconds in both)
        stands_for = (
            CONSTANTS[name].stands_for if name in CONSTANTS else "of each framework's profile"
        )
        lines.append((name, *errors, stands_for))
        print(*lines[-1], file=sys.stderr, flush=True)
    table(
        "Errors with a number held at its prior",
        ("held", "left out", "fitted", "stands for"),
        lines,
    )


def get_held(fit: Fit, held: str) -> Fit:
    """The fit that leaves a number, of all profiles, where it is."""
    spread = [
        HELD if name == held else own for (_, name), own in zip(fit.names, fit.spread, strict=True)
    ]
    return evolve(fit, spread=np.array(spread))


def get_mean_error(fit: Fit, rows: Sequence[Row], seconds: Array) -> float:
    """The mean over sources of their rows' median errors."""
    of_source = dict[str, list[float]]()
    for row, predicted, measured in zip(rows, seconds, fit.seconds, strict=True):
        of_source.setdefault(row["source"], []).append(abs(predicted / measured - 1))
    return mean(median(errors) for errors in of_source.values())


if __name__ == "__main__":
    sys.exit(main())
