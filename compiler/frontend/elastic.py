"""An axis with a range of sizes, `mesh { dp = 4..8 }`: which ranges there may be, and the size that
a plan begins with.

Non-goals: the program at each size (`analysis.elastic`).
"""

from collections.abc import Sequence
from math import prod

from attrs import evolve

from ..analysis.elastic import elastic_axis, sizes
from ..analysis.stage_schedule import rows
from ..config.settings import AUTO, Train
from ..config.units import count_words
from ..config.values import help_for_digits
from ..ir import BATCH, MICROBATCHES, Axis, Program
from ..schedules.actions import ScheduleError
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note

MOST = 2**20
"""The most ranks of an axis."""


def range_of(sizes_range: tree.Range, diagnostics: Diagnostics) -> tuple[int, int] | None:
    """The least and the most ranks; None if there are mistakes, added to `diagnostics`."""
    match sizes_range:
        case tree.Range(tree.Number(int() as least, ""), tree.Number(int() as most, "")) if (
            0 < least <= most <= MOST
        ):
            return least, most
        case tree.Range(tree.Number(int() as least, ""), tree.Number(int() as most, "")) if (
            0 < most < least
        ):
            help = f"write `{most}..{least}`, the least first"
            diagnostics.error(
                "E0520",
                "this range has no sizes",
                sizes_range.span,
                f"{least} is more than {most}",
                help=help,
            )
        case tree.Range(first, last):
            help = help_for_digits(first) or help_for_digits(last)
            help = help or "write `dp = 4..8`, both of them sizes from 1 to 2^20"
            diagnostics.error("E0501", "this is not a range of sizes", sizes_range.span, help=help)
    return None


def check_ranges(
    axes: Sequence[Axis], rules: Sequence[tree.Rule], diagnostics: Diagnostics
) -> None:
    """One axis has a range, and nothing but `batch` is sharded over it."""
    elastic = [axis for axis in axes if axis.within]
    if not elastic:
        return
    first = elastic[0]
    for axis in elastic[1:]:
        notes = [Note(first.span, "the first one")]
        help = "one axis gives up ranks where nodes are lost: write one size for the other"
        diagnostics.error(
            "E0520", "two axes have ranges", axis.span, "a second one", notes=notes, help=help
        )
    if dim := _dim_over(first, rules):
        notes = [Note(first.span, "may have several sizes")]
        message = f"`{dim}` is sharded over `{first.name}`, which has a range"
        help = (
            f"only `{BATCH}` may be: a rank's part of `{dim}` would change with the size,"
            " and its work too"
        )
        diagnostics.error("E0520", message, dim.span, notes=notes, help=help)


def _dim_over(axis: Axis, rules: Sequence[tree.Rule]) -> tree.Name | None:
    """The first dim besides `batch` that a rule shards over an axis."""
    for rule in rules:
        if axis.name not in map(str, rule.axes):
            continue
        for dim in rule.dims:
            if str(dim) != BATCH:
                return dim
    return None


def with_initial_sizes(
    axes: Sequence[Axis], rules: Sequence[tree.Rule], train: Train, diagnostics: Diagnostics
) -> tuple[Axis, ...]:
    """The axes; an elastic one has the largest of its sizes that makes a step of whole
    microbatches.
    """
    names: set[str] = set()
    for rule in rules:
        if BATCH in map(str, rule.dims):
            names.update(map(str, rule.axes))
    others = prod(axis.size for axis in axes if axis.name in names and not axis.within)
    axes_with_sizes: list[Axis] = []
    for axis in axes:
        if axis.within and axis.name in names:
            axis = _with_initial_size(axis, others, train, diagnostics)
        axes_with_sizes.append(axis)
    return tuple(axes_with_sizes)


def _with_initial_size(axis: Axis, others: int, train: Train, diagnostics: Diagnostics) -> Axis:
    least, most = axis.within or (axis.size, axis.size)
    unit = train.microbatch * others
    for size in range(most, least - 1, -1):
        if train.global_batch % (unit * size) == 0:
            return evolve(axis, size=size, within=axis.within)
    ranks = f"{least} … {most} ranks"
    if others > 1:
        ranks = f"{others} × {ranks}"
    whole = unit * most
    rows = Note(train.spans["microbatch"], "sequences of a microbatch on each rank")
    diagnostics.error(
        "E0310",
        f"`global_batch` is a whole number of microbatches with no size of `{axis.name}`",
        train.spans["global_batch"],
        f"{train.global_batch} / ({train.microbatch} sequences × {ranks}) is not whole",
        notes=[Note(axis.span, "the range"), rows],
        help=f"multiples of {whole} are with {most}, for instance"
        f" {-(-train.global_batch // whole) * whole}",
    )
    diagnostics.doubt(section="mesh")
    return evolve(axis, within=None)


def check_rows(program: Program, diagnostics: Diagnostics) -> None:
    """A pipeline's schedule has rows for the microbatches of each size."""
    axis, pipeline = elastic_axis(program), program.pipeline
    if not axis or not pipeline or len(sizes(program)) < 2:
        return
    largest, *_, least = sizes(program)
    count, kind = program.size(MICROBATCHES), pipeline.settings.schedule.kind
    if pipeline.rows or kind == AUTO:
        origin = "a file" if pipeline.rows else f"`schedule = {AUTO}`"
        message = (
            f"rows of {origin} are for one number of microbatches, and `{axis.name}` has a range"
        )
        with_least = count * largest // least
        label = f"{count_words(count, 'microbatch')} with {largest}, {with_least} with {least}"
        help = "take a schedule that has a name, such as `1f1b`, or write one size"
        diagnostics.error("E0520", message, axis.span, label, help=help)
        return
    ranks = program.axis(pipeline.axis).size
    for size in sizes(program):
        try:
            rows(pipeline, ranks, count * largest // size)
        except ScheduleError as error:
            diagnostics.error(
                "E0520",
                f"`{kind}` has no rows for `{axis.name}` = {size}",
                axis.span,
                error.why,
                help=error.help,
            )
            return
