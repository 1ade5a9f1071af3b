"""The section `pipeline`, and the rules of `shard` that split repeats over an axis into stages;
rows from a file.
"""

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from ..config.settings import FILE, Order, Pipelining
from ..ir import MICROBATCHES, Axis, Claim, Pipeline, Program, Region, regions_in, walk_regions
from ..schedules.actions import Schedule
from ..schedules.check import problems
from ..schedules.csv_file import BadRows, read_csv
from ..schedules.dependencies import Problem
from ..syntax.diagnostics import Diagnostic, Diagnostics, Note, PlanError
from ..syntax.limits import load
from ..syntax.source import Span


def pipelined(
    program: Program,
    given: Pipelining | None,
    head: Span,
    laid: Sequence[Claim],
    diagnostics: Diagnostics,
) -> Program:
    """The program with the claims of repeats taken for its pipeline; `laid` has those over axes of
    size 1 too, on which there is one stage: the model as it is.  `head` is that of the section, if
    settings are given.

    Where there are mistakes, which are added to `diagnostics`, the program has neither these claims nor a
    pipeline.
    """
    repeats = regions_in(program.region.body)
    dims = {region.dim for region in walk_regions(repeats)}
    cuts = [claim for claim in laid if claim.dim in dims]
    if not cuts:
        if given:
            help = "put a repeat over an axis in `shard`, as in `layers over pp`"
            diagnostics.error("E0517", "there is nothing to split into stages", head, help=help)
            diagnostics.used.update(axis.name for axis in program.axes)
        return program
    cuts = [claim for claim in cuts if program.axis(claim.axis).size > 1]
    if not cuts:
        return program
    settings = given or _unset(cuts[0].span)
    claims = tuple(claim for claim in program.claims if claim not in cuts)
    before, rows = diagnostics.count, None
    _check(program, cuts, repeats, diagnostics)
    if diagnostics.count == before:
        with diagnostics.catch():
            rows = given_rows(program, program.axis(cuts[0].axis), settings.schedule)
    if diagnostics.count > before:
        diagnostics.used.update(claim.axis for claim in cuts)
        return evolve(program, claims=claims)
    outermost = tuple(
        repeat.dim for repeat in repeats if repeat.dim in {claim.dim for claim in cuts}
    )
    return evolve(
        program, claims=claims, pipeline=Pipeline(cuts[0].axis, outermost, settings, rows)
    )


def _unset(claim_span: Span) -> Pipelining:
    """The settings of a plan without `pipeline`; their place is where the repeats are laid over
    their axis.
    """
    spans: dict[str, Span] = dict.fromkeys(("schedule", "stages"), claim_span)
    return Pipelining(Order(spans=spans), spans=spans)


def check_file(settings: Pipelining) -> None:
    """Raises PlanError where rows of a file have no path, or settings of other schedules."""
    diagnostics, order = Diagnostics(), settings.schedule
    if order.kind != FILE:
        return
    if order.path is None:
        diagnostics.error(
            "E0402",
            f"`{FILE}` needs a path",
            order.spans["kind"],
            help=f'write `schedule = {FILE}("rows.csv")`',
        )
    if order.chunks is not None:
        message = f"`chunks` is not a setting of `{FILE}`"
        diagnostics.error(
            "E0401",
            message,
            order.spans["chunks"],
            "the rows of the file say which stages a rank has",
        )
    diagnostics.check()


def _check(
    program: Program, cuts: Sequence[Claim], repeats: Sequence[Region], diagnostics: Diagnostics
) -> None:
    """Checks that cut repeats are outermost, each over the one axis that nothing else lies over."""
    axis, inner = (
        cuts[0].axis,
        {region.dim for repeat in repeats for region in walk_regions(repeat.body)},
    )
    told: set[object] = set()
    for claim in cuts:
        place = (claim.span, claim.axis)  # the same for all parts of a repeat with branches
        if place in told:
            continue
        told.add(place)
        heads = [repeat.span for repeat in repeats if repeat.dim == claim.dim]
        if claim.dim in inner:
            help = "split the repeat around it"
            diagnostics.error(
                "E0513",
                f"`{claim.dim}` is the dim of another repeat",
                claim.span,
                "cannot be cut",
                help=help,
            )
        elif len(heads) > 1:
            notes = [Note(heads[0], "the first one"), Note(heads[1], "the second one")]
            message = f"`{claim.dim}` is repeated {len(heads)} times"
            diagnostics.error(
                "E0513", message, claim.span, notes=notes, help="give each a dim of its own"
            )
        elif claim.axis != axis:
            message = f"repeats are split over one axis, not over `{axis}` and `{claim.axis}`"
            notes = [Note(cuts[0].span, "split here")] if cuts[0].span != claim.span else []
            diagnostics.error(
                "E0513", message, claim.span, notes=notes, help=f"put them over `{axis}` alone"
            )
    for claim in program.claims:
        if claim.axis == axis and claim not in cuts:
            note = Note(cuts[0].span, "split into stages here")
            help = "give the stages an axis of their own in `mesh`"
            diagnostics.error(
                "E0513",
                f"`{claim.dim}` is sharded over the stages' axis",
                claim.span,
                notes=[note],
                help=help,
            )


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
        schedule = read_csv(text)
    except BadRows as error:
        problem = Problem(error.rank, error.cell, error.why, "")
        raise PlanError([_told(problem, order, "both counted from 0")]) from None
    rows = (tuple(action for action in row if not action.work.is_message) for row in schedule.rows)
    schedule = evolve(schedule, rows=tuple(rows))
    _fits(schedule, program, axis, order)
    if found := problems(schedule):
        told = [
            _told(problem, order, "both counted from 0, cells without empty ones")
            for problem in found[:MOST_TOLD]
        ]
        if (more := len(found) - MOST_TOLD) > 0:
            told.append(
                Diagnostic("E0517", f"`{order.path}`: {more} more like these", order.spans["path"])
            )
        raise PlanError(told)
    return schedule


def _fits(schedule: Schedule, program: Program, axis: Axis, order: Order) -> None:
    """As many ranks and microbatches as the plan has."""
    microbatches = program.dim(MICROBATCHES)
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
            help="write a row for each rank"
            if what == "ranks"
            else "each stage runs once per microbatch",
        )
        for what, has, needed, note in pairs
        if has != needed
    ]
    if found:
        raise PlanError(found)


def _told(problem: Problem, order: Order, counted: str) -> Diagnostic:
    """A problem in another file, shown where the plan names that file."""
    cell = "" if problem.cell is None else f", cell {problem.cell}"
    label, notes = (
        f"rank {problem.rank}{cell}",
        () if problem.cell is None else (Note(None, counted),),
    )
    return Diagnostic(
        "E0517", f"`{order.path}`: {problem.why}", order.spans["path"], label, notes, problem.help
    )
