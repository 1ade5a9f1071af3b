"""Cuts the repeats of a pipeline into stages: how many layers each has, and on which rank.

Purpose: stages of costs as equal as layers allow, or those of the plan; values that a later stage
needs from an earlier one are carried by the repeats between (`thread_carries`).  Costs are
operations, or where the cluster's GPU is known and ranks then work less long, seconds of forward
and backward.  Before: `validate`.  Non-goals: when a stage works (`schedule_pipeline`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve

from ..analysis.flops import cost
from ..analysis.memory import account, fits
from ..analysis.stage_schedule import stage_to_rank
from ..config.units import counted
from ..ir import Pipeline, Program, ops_in
from ..ir.stages import groups, readers
from ..schedules.actions import ScheduleError
from ..schedules.partition import balanced
from ..syntax.diagnostics import Note, PlanError, wrong
from ..syntax.source import Span
from .thread_carries import carried

if TYPE_CHECKING:
    from ..analysis.hardware import Hardware

MOST_LAYERS = 1024

WORTH = 0.995
"""A division with which the rank that works longest takes more than this part of the time is
not taken.
"""


Lowered = Callable[[Program, str], Program]
"""Gives the program after a later pass."""


def cut_stages(program: Program, lowered: Lowered) -> Program:
    """The program with its pipeline's stages.  Raises PlanError."""
    if not (pipeline := program.pipeline):
        return program
    from ..analysis.hardware import hardware

    made, on = with_stages(program, pipeline), hardware(program)
    if not on or pipeline.given or pipeline.settings.stages is not None:
        return made
    try:
        return _faster(program, made, on, lowered)
    except PlanError:  # which the pass that raises it tells
        return made


def _faster(program: Program, made: Program, on: "Hardware", lowered: Lowered) -> Program:
    """The program cut by seconds, if the rank that works longest then has less to do, and the
    step fits.
    """
    from ..analysis.stage_times import item_times  # a plan without a cluster does without

    pipeline, cut = program.pipeline, made.pipeline
    assert pipeline, "cut_stages: no pipeline"
    assert cut, "cut_stages: no stages"
    times = item_times(lowered(made, "place_state"), cut, on)
    of_groups, of_layers = (
        tuple(round(seconds * 1e9) for seconds in each) for each in (times.groups, times.layers)
    )
    layers = _divided(program, pipeline, of_groups, of_layers, len(cut.layers))
    now, then = (times.longest(program, evolve(cut, layers=each)) for each in (cut.layers, layers))
    if then > WORTH * now:
        return made
    other = with_stages(program, pipeline, layers)
    if layers[0] <= cut.layers[0] and max(layers) <= max(cut.layers):
        return other  # the first rank, which holds most microbatches, needs no more memory
    last = lowered(other, "schedule_pipeline")
    return made if fits(last, account(last)) is False else other


def with_stages(program: Program, pipeline: Pipeline, layers: tuple[int, ...] = ()) -> Program:
    """The program with stages of these numbers of layers, by default those of the plan or of equal
    operations.

    Raises PlanError.
    """
    total = sum(program.size(dim) for dim in pipeline.dims)
    placed = _homes(program, pipeline, total)
    if pipeline.settings.stages is None:
        layers = layers or _balanced(program, pipeline, len(placed))
    else:
        layers = _given(program, pipeline, pipeline.settings.stages, len(placed), total)
    program = evolve(program, region=carried(program, pipeline))
    pipeline = evolve(pipeline, stage_to_rank=placed, layers=layers)
    return evolve(program, pipeline=evolve(pipeline, param_stages=_param_stages(program, pipeline)))


# ---- how many stages there are, and how many layers each has


def _homes(program: Program, pipeline: Pipeline, total: int) -> tuple[int, ...]:
    """The rank of each stage."""
    order, axis = pipeline.settings.schedule, program.axis(pipeline.axis)
    if total > MOST_LAYERS:
        help = f"at most {MOST_LAYERS:,} are divided into stages; split a repeat around it"
        raise _error(
            f"{total:,} iterations are too many", pipeline.settings.spans["schedule"], help=help
        )
    _demand_layers(axis.size * (order.chunks or 1), program, pipeline, total)
    try:
        placed = stage_to_rank(pipeline, axis.size)
    except ScheduleError as error:
        span = order.spans["chunks"] if order.chunks else pipeline.settings.spans["schedule"]
        raise _error(error.why, span, help=error.help) from None
    _demand_layers(len(placed), program, pipeline, total)
    return placed


def _demand_layers(count: int, program: Program, pipeline: Pipeline, total: int) -> None:
    """A layer for each stage between the first and the last."""
    if count <= total + 2:
        return
    axis, order = program.axis(pipeline.axis), pipeline.settings.schedule
    span = order.spans["chunks"] if order.chunks else pipeline.settings.spans["schedule"]
    label = f"{count // axis.size} on each of {axis.size} ranks" if count % axis.size == 0 else ""
    help = (
        "every stage but the first and the last needs an iteration of a repeat: at most"
        f" {total + 2} stages"
    )
    why = f"{counted(total, 'iteration')} cannot fill {counted(count, 'stage')}"
    raise _error(why, span, label, (Note(axis.span, "the ranks"),), help)


def _balanced(program: Program, pipeline: Pipeline, count: int) -> tuple[int, ...]:
    """Stages whose forwards have costs as equal as can be; statements after a repeat go with
    its last layer.
    """
    bodies, repeats = groups(pipeline, program.region.body)
    of_groups = tuple(cost(program, body).forward for body in bodies)
    of_layers = tuple(cost(program, repeat.body).forward for repeat in repeats)
    return _divided(program, pipeline, of_groups, of_layers, count)


def _divided(
    program: Program,
    pipeline: Pipeline,
    of_groups: tuple[int, ...],
    of_layers: tuple[int, ...],
    count: int,
) -> tuple[int, ...]:
    """The layers of `count` stages of equal costs, by those of groups of ops and of a layer of
    each repeat.
    """
    first, *between, last = of_groups
    costs: list[int] = []
    for dim, layer, following in zip(pipeline.dims, of_layers, (*between, 0), strict=True):
        costs += [layer] * program.size(dim)
        costs[-1] += following
    return balanced(tuple(costs), first, last, count)


def _given(
    program: Program, pipeline: Pipeline, layers: tuple[int, ...], count: int, total: int
) -> tuple[int, ...]:
    """The layers that the plan gives, if they are possible."""
    span, axis, kind = (
        pipeline.settings.spans["stages"],
        pipeline.axis,
        pipeline.settings.schedule.kind,
    )
    if len(layers) != count:
        note = Note(program.axis(axis).span, "the ranks")
        help = (
            f"`{kind}` has {count} stages on the {program.axis(axis).size} ranks of `{axis}`:"
            " write as many numbers"
        )
        raise _error(
            f"the schedule has {counted(count, 'stage')}, not {len(layers)}",
            span,
            "",
            (note,),
            help,
        )
    if sum(layers) != total:
        sums = f"{' + '.join(map(str, layers))} = {sum(layers)}"
        notes = tuple(
            Note(dim.span, counted(dim.size, "iteration"))
            for dim in program.dims
            if dim.name in pipeline.dims
        )
        help = f"{'add' if sum(layers) < total else 'take away'} {abs(total - sum(layers))}"
        raise _error(
            f"stages have {counted(sum(layers), 'iteration')}, the repeats {total}",
            span,
            sums,
            notes,
            help,
        )
    if empty := [stage for stage in range(1, count - 1) if not layers[stage]]:
        help = "only the first and the last stage may have no iteration"
        raise _error(f"stage {empty[0]} has nothing to do", span, "counted from 0", help=help)
    return layers


def _error(
    why: str, span: Span, label: str = "", notes: tuple[Note, ...] = (), help: str = ""
) -> PlanError:
    return wrong("E0517", why, span, label, help, notes=notes)


# ---- which stages have a parameter


def _param_stages(program: Program, pipeline: Pipeline) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The stages of each parameter that does not come slice by slice to a repeat that is cut."""
    body = program.region.body
    params = {op.outputs[0].name: op.inputs[0] for op in ops_in(body) if op.kind == "leaf"}
    return readers(program, pipeline, body, params)
