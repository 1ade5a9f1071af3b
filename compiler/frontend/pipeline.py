"""The section `pipeline`, and the rules of `shard` that split repeats over an axis into stages;
rows from a file.
"""

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from ..config.settings import FILE, Order, Pipelining
from ..ir import MICROBATCHES, Axis, Claim, Pipeline, Program, Region, regions_in, walk_regions
from ..schedules.actions import Action, Schedule
from ..schedules.check import problems
from ..schedules.csv_file import BadRows, parse_csv
from ..schedules.dependencies import Problem
from ..syntax.diagnostics import Diagnostic, Diagnostics, Note, PlanError
from ..syntax.limits import load
from ..syntax.source import Span


def with_pipeline(
    program: Program,
    settings: Pipelining | None,
    head: Span,
    all_claims: Sequence[Claim],
    diagnostics: Diagnostics,
) -> Program:
    """The program with the claims of repeats taken for its pipeline.

    `settings` and `head` are of the section, if the plan has one.  `all_claims` has the claims over
    axes of size 1 too: on such an axis there is one stage, the model as it is.

    Where there are mistakes, which are added to `diagnostics`, the program has neither these claims
    nor a pipeline.
    """
    repeats = regions_in(program.region.body)
    dims = {region.dim for region in walk_regions(repeats)}
    cuts = [claim for claim in all_claims if claim.dim in dims]
    if not cuts and settings:
        help = "put a repeat over an axis in `shard`, as in `layers over pp`"
        diagnostics.error("E0517", "there is nothing to split into stages", head, help=help)
        diagnostics.used.update(axis.name for axis in program.axes)
    cuts = [claim for claim in cuts if program.axis(claim.axis).size > 1]
    if not cuts:
        return program
    settings = settings or _unset(cuts[0].span)
    claims = tuple(claim for claim in program.claims if claim not in cuts)
    before, rows = diagnostics.count, None
    _check(program, cuts, repeats, diagnostics)
    if diagnostics.count == before:
        with diagnostics.catch():
            rows = load_rows(program, program.axis(cuts[0].axis), settings.schedule)
    if diagnostics.count > before:
        diagnostics.used.update(claim.axis for claim in cuts)
        return evolve(program, claims=claims)
    cut_dims = {claim.dim for claim in cuts}
    outermost = tuple(repeat.dim for repeat in repeats if repeat.dim in cut_dims)
    pipeline = Pipeline(cuts[0].axis, outermost, settings, rows)
    return evolve(program, claims=claims, pipeline=pipeline)


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
    inner: set[str] = set()
    for repeat in repeats:
        inner.update(region.dim for region in walk_regions(repeat.body))
    checked_places: set[object] = set()
    for claim in cuts:
        place = (claim.span, claim.axis)  # the same for all parts of a repeat with branches
        if place not in checked_places:
            checked_places.add(place)
            _check_cut(claim, cuts[0], repeats, inner, diagnostics)
    for claim in program.claims:
        if claim.axis == cuts[0].axis and claim not in cuts:
            note = Note(cuts[0].span, "split into stages here")
            help = "give the stages an axis of their own in `mesh`"
            diagnostics.error(
                "E0513",
                f"`{claim.dim}` is sharded over the stages' axis",
                claim.span,
                notes=[note],
                help=help,
            )


def _check_cut(
    claim: Claim,
    first: Claim,
    repeats: Sequence[Region],
    inner: set[str],
    diagnostics: Diagnostics,
) -> None:
    """Checks one claim of a repeat.

    `first` is the first of these claims; `inner` has the dims of repeats inside others.
    """
    heads = [repeat.span for repeat in repeats if repeat.dim == claim.dim]
    if claim.dim in inner:
        help = "split the repeat around it"
        message = f"`{claim.dim}` is the dim of another repeat"
        diagnostics.error("E0513", message, claim.span, "cannot be cut", help=help)
    elif len(heads) > 1:
        notes = [Note(heads[0], "the first one"), Note(heads[1], "the second one")]
        message = f"`{claim.dim}` is repeated {len(heads)} times"
        help = "give each a dim of its own"
        diagnostics.error("E0513", message, claim.span, notes=notes, help=help)
    elif claim.axis != first.axis:
        message = f"repeats are split over one axis, not over `{first.axis}` and `{claim.axis}`"
        notes = [Note(first.span, "split here")] if first.span != claim.span else []
        help = f"put them over `{first.axis}` alone"
        diagnostics.error("E0513", message, claim.span, notes=notes, help=help)


MOST_BYTES = 2**20
MOST_REPORTED = 5


def load_rows(program: Program, axis: Axis, order: Order) -> Schedule | None:
    """The rows of the plan's file, if it names one, without messages.  Raises PlanError."""
    if order.kind != FILE:
        return None
    span = order.spans["path"]
    assert order.path, "resolve: rows without a path were not reported"
    path = Path(span.path).parent / order.path
    text = load(path, span, MOST_BYTES).text
    try:
        schedule = parse_csv(text)
    except BadRows as error:
        problem = Problem(error.rank, error.cell, error.why, "")
        raise PlanError([_to_diagnostic(problem, order, "both counted from 0")]) from None
    rows: list[tuple[Action, ...]] = []
    for row in schedule.rows:
        rows.append(tuple(action for action in row if not action.work.is_message))
    schedule = evolve(schedule, rows=tuple(rows))
    _fits(schedule, program, axis, order)
    all_problems = problems(schedule)
    if not all_problems:
        return schedule
    diagnostics: list[Diagnostic] = []
    for problem in all_problems[:MOST_REPORTED]:
        counted = "both counted from 0, cells without empty ones"
        diagnostics.append(_to_diagnostic(problem, order, counted))
    further = len(all_problems) - MOST_REPORTED
    if further > 0:
        message = f"`{order.path}`: {further} more like these"
        diagnostics.append(Diagnostic("E0517", message, order.spans["path"]))
    raise PlanError(diagnostics)


def _fits(schedule: Schedule, program: Program, axis: Axis, order: Order) -> None:
    """As many ranks and microbatches as the plan has."""
    diagnostics: list[Diagnostic] = []
    if schedule.ranks != axis.size:
        diagnostics.append(
            Diagnostic(
                "E0517",
                f"`{order.path}` is for {schedule.ranks} ranks, the plan has {axis.size}",
                order.spans["path"],
                notes=(Note(axis.span, "the axis"),),
                help="write a row for each rank",
            )
        )
    microbatches = program.dim(MICROBATCHES)
    if schedule.microbatches != microbatches.size:
        diagnostics.append(
            Diagnostic(
                "E0517",
                f"`{order.path}` is for {schedule.microbatches} microbatches, the plan has"
                f" {microbatches.size}",
                order.spans["path"],
                notes=(Note(microbatches.span, f"{microbatches.size} of them"),),
                help="each stage runs once per microbatch",
            )
        )
    if diagnostics:
        raise PlanError(diagnostics)


def _to_diagnostic(problem: Problem, order: Order, counted: str) -> Diagnostic:
    """A problem in another file, shown where the plan names that file."""
    label = f"rank {problem.rank}"
    notes: tuple[Note, ...] = ()
    if problem.cell is not None:
        label += f", cell {problem.cell}"
        notes = (Note(None, counted),)
    message = f"`{order.path}`: {problem.why}"
    return Diagnostic("E0517", message, order.spans["path"], label, notes, problem.help)
