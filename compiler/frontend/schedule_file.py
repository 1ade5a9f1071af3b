"""`schedule = file("rows.csv")`: the rows that a person or another program wrote.

Purpose: rows that do all the work of the plan's stages, or a diagnostic for each problem.  Non-goals: messages, which
the compiler adds to all rows alike (`passes.schedule_pipeline`).
"""

from collections.abc import Iterator
from pathlib import Path

from attrs import evolve

from ..config.settings import FILE, Order
from ..ir import MICROBATCHES, Axis, Program
from ..schedules.actions import Schedule
from ..schedules.check import problems
from ..schedules.csv_file import BadRows, read_csv
from ..schedules.violations import Problem
from ..syntax.diagnostics import Diagnostic, Note, PlanError
from ..syntax.limits import load

MOST_BYTES = 2**20
MOST_TOLD = 5


def given_rows(program: Program, axis: Axis, order: Order) -> Schedule | None:
    """The rows of the plan's file, if it names one, without messages.  Raises PlanError."""
    if order.kind != FILE:
        return None
    span = order.spans["path"]
    assert order.path, "resolve: rows without a path were not reported"
    path = Path(span.path).parent / order.path
    text = load(path, span, MOST_BYTES).text
    try:
        schedule = _computing(read_csv(text))
    except BadRows as error:
        problem = Problem(error.rank, error.cell, error.why, "")
        raise PlanError([_told(problem, order, "both counted from 0")]) from None
    _fits(schedule, program, axis, order)
    found = problems(schedule)
    if found:
        raise PlanError([*_few(found, order)])
    return schedule


def _computing(schedule: Schedule) -> Schedule:
    rows = (tuple(action for action in row if not action.work.is_message) for row in schedule.rows)
    return evolve(schedule, rows=tuple(rows))


def _fits(schedule: Schedule, program: Program, axis: Axis, order: Order) -> None:
    """As many ranks and microbatches as the plan has."""
    microbatches = next(dim for dim in program.dims if dim.name == MICROBATCHES)
    pairs = (
        ("ranks", schedule.ranks, axis.size, Note(axis.span, "the axis")),
        (
            "microbatches",
            schedule.microbatches,
            microbatches.size,
            Note(microbatches.span, f"{microbatches.size} of them"),
        ),
    )
    found = [
        Diagnostic(
            "E0517",
            f"`{order.path}` is for {has} {what}, the plan has {needed}",
            order.spans["path"],
            notes=(note,),
            help="write a row for each rank" if what == "ranks" else "each stage runs once per microbatch",
        )
        for what, has, needed, note in pairs
        if has != needed
    ]
    if found:
        raise PlanError(found)


def _few(found: list[Problem], order: Order) -> Iterator[Diagnostic]:
    for problem in found[:MOST_TOLD]:
        yield _told(problem, order, "both counted from 0, cells without empty ones")
    if (more := len(found) - MOST_TOLD) > 0:
        yield Diagnostic("E0517", f"`{order.path}`: {more} more like these", order.spans["path"])


def _told(problem: Problem, order: Order, counted: str) -> Diagnostic:
    """A problem, which stands in another file, where the plan names that."""
    cell = "" if problem.cell is None else f", cell {problem.cell}"
    label, notes = f"rank {problem.rank}{cell}", () if problem.cell is None else (Note(None, counted),)
    return Diagnostic("E0517", f"`{order.path}`: {problem.why}", order.spans["path"], label, notes, problem.help)
