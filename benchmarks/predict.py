"""`.venv/bin/python benchmarks/predict.py ROWS.csv [--clusters FILE] [--profile FILE] [--json
FILE]`: others' steps.

Each row of published training steps becomes a plan that the compiler makes a program of.  Its work,
read off the IR, is priced by the row's GPU and cluster and by the profile of its framework
(`predicting.steps`).  Printed are the errors of rows that have a time, by source, GPU and
framework, how well the fastest of a cell is found, and the rows furthest off; the JSON has seconds,
their parts, memory and whether it fits for each row, or why the plan language cannot say it.

Rows of `memory.csv` and `pipeline.csv` are known by their columns; `predicting` has a module for
each.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

from predicting import figures, memory, pipeline
from predicting.choices import print_by_memory
from predicting.errors import by_group, print_choices, print_worst
from predicting.frameworks import read_profile
from predicting.reserved import print_errors
from predicting.rows import Row, read
from predicting.training import predicted, read_work


def main() -> None:
    parser = ArgumentParser(description=__doc__, prog="predict.py")
    parser.add_argument("rows", type=Path)
    parser.add_argument(
        "--clusters", type=Path, help="their networks; unset, clusters.csv beside the rows"
    )
    parser.add_argument(
        "--profile", type=Path, help="a framework's numbers; unset, those of each row's framework"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = read(given.rows)
    if rows and "T_F_ms" in rows[0]:
        _other(
            rows,
            pipeline.Predictor(rows),
            pipeline.FIGURES,
            given.json,
            lambda row: row["schedule"],
        )
        return
    if rows and "other_args" in rows[0]:
        _other(rows, memory.predicted, memory.FIGURES, given.json, memory.kind)
        return
    begin, file = perf_counter(), given.clusters or given.rows.with_name("clusters.csv")
    work = read_work(rows, {row["cluster"]: row for row in read(file)} if file.is_file() else {})
    found = predicted(work, given.profile and read_profile(given.profile))
    print(f"{len(rows)} rows in {perf_counter() - begin:.0f} s, {len(work.whys)} that no plan says")
    if given.json:
        given.json.write_text(json.dumps({"rows": found}, indent=1))
    for column in ("source", "gpu", "framework"):
        by_group(work.rows, [found[row["id"]]["step_s"] for row in work.rows], column)
    print_choices(work.rows, [found[row["id"]]["step_s"] for row in work.rows])
    print_by_memory(rows, found)
    print_worst(work.rows, found)
    print_errors(rows, found)


def _other(
    rows: Sequence[Row],
    predictor: Callable[[Row], Mapping[str, float]],
    names: Sequence[str],
    json_file: Path | None,
    group: Callable[[Row], str],
) -> None:
    """Predicts rows that are no training steps."""
    found = figures.predicted(rows, predictor, names)
    if json_file:
        json_file.write_text(json.dumps({"rows": found}, indent=1))
    unsaid = sum(it[names[0]] is None for it in found.values())
    print(f"{len(found)} rows, {unsaid} that cannot be predicted")
    figures.print_errors(rows, found, names, group)


if __name__ == "__main__":
    sys.exit(main())
