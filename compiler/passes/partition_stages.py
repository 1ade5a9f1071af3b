"""Cuts the repeats of a pipeline into stages: how many layers each has, and on which rank.

Purpose: stages of as many layers as somebody says, the plan for one, or of operations as equal as
layers allow; values that a later stage needs from an earlier one are carried by the repeats between
(`thread_carries`).  Before: `validate`.  Non-goals: stages of equal seconds
(`tuning.decisions`); when a stage works (`schedule_pipeline`).
"""

from attrs import evolve

from ..analysis.flops import cost
from ..analysis.stage_schedule import stage_to_rank
from ..config.units import count_words
from ..ir import Pipeline, Program, ops_in
from ..ir.stages import groups, readers
from ..schedules.actions import ScheduleError
from ..schedules.partition import balance_stages
from ..syntax.diagnostics import Note, PlanError, wrong
from ..syntax.source import Span
from .thread_carries import thread_carries

MOST_LAYERS = 1024


def with_stages(program: Program, pipeline: Pipeline, layers: tuple[int, ...] = ()) -> Program:
    """The program with stages of these numbers of layers, by default the plan's numbers or stages
    of equal operations.

    Raises PlanError.
    """
    total = sum(program.size(dim) for dim in pipeline.dims)
    placed = _homes(program, pipeline, total)
    if pipeline.settings.stages is None:
        layers = layers or _balance_operations(program, pipeline, len(placed))
    else:
        layers = _layers_of_plan(program, pipeline, pipeline.settings.stages, len(placed), total)
    program = evolve(program, region=thread_carries(program, pipeline))
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
    label = ""
    if count % axis.size == 0:
        label = f"{count // axis.size} on each of {axis.size} ranks"
    help = (
        "every stage but the first and the last needs an iteration of a repeat: at most"
        f" {total + 2} stages"
    )
    why = f"{count_words(total, 'iteration')} cannot fill {count_words(count, 'stage')}"
    raise _error(why, span, label, (Note(axis.span, "the ranks"),), help)


def _balance_operations(program: Program, pipeline: Pipeline, count: int) -> tuple[int, ...]:
    """Stages whose forwards have costs as equal as can be; statements after a repeat go with
    its last layer.
    """
    bodies, repeats = groups(pipeline, program.region.body)
    of_groups = tuple(cost(program, body).forward for body in bodies)
    of_layers = tuple(cost(program, repeat.body).forward for repeat in repeats)
    return divide_layers(program, pipeline, of_groups, of_layers, count)


def divide_layers(
    program: Program,
    pipeline: Pipeline,
    of_groups: tuple[int, ...],
    of_layers: tuple[int, ...],
    count: int,
) -> tuple[int, ...]:
    """The layers of `count` stages of equal costs, by the costs of groups of ops and the cost of a
    layer of each repeat.
    """
    first, *between, last = of_groups
    costs: list[int] = []
    for dim, layer, following in zip(pipeline.dims, of_layers, (*between, 0), strict=True):
        costs += [layer] * program.size(dim)
        costs[-1] += following
    return balance_stages(tuple(costs), first, last, count)


def _layers_of_plan(
    program: Program, pipeline: Pipeline, layers: tuple[int, ...], count: int, total: int
) -> tuple[int, ...]:
    """The layers that the plan gives, if they are possible."""
    span, axis = pipeline.settings.spans["stages"], program.axis(pipeline.axis)
    kind = pipeline.settings.schedule.kind
    if len(layers) != count:
        note = Note(axis.span, "the ranks")
        help = (
            f"`{kind}` has {count} stages on the {axis.size} ranks of `{axis.name}`:"
            " write as many numbers"
        )
        why = f"the schedule has {count_words(count, 'stage')}, not {len(layers)}"
        raise _error(why, span, "", (note,), help)
    if sum(layers) != total:
        sums = f"{' + '.join(map(str, layers))} = {sum(layers)}"
        notes = list[Note]()
        for dim in program.dims:
            if dim.name in pipeline.dims:
                notes.append(Note(dim.span, count_words(dim.size, "iteration")))
        verb = "add" if sum(layers) < total else "take away"
        help = f"{verb} {abs(total - sum(layers))}"
        why = f"stages have {count_words(sum(layers), 'iteration')}, the repeats {total}"
        raise _error(why, span, sums, tuple(notes), help)
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
