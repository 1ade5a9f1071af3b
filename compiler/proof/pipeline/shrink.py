"""A pipeline at small sizes: its stages with few layers each, its rows for few microbatches.

On few ranks the same kinds of stages: a first and a last one that have layers if the plan's have,
one that has more layers than the others, and cuts where as different values cross as at the plan's
cuts.  Where the step names ranks by their numbers, they are the small pipeline's ranks.
"""

from itertools import accumulate, pairwise

from attrs import evolve

from ...analysis import stage_schedule
from ...analysis.param_uses import leaves
from ...ir import MICROBATCHES, Op, Pipeline, Program, Region, Stmt, Value, base
from ...ir.stages import crossing, readers, stages
from ...schedules.actions import Schedule, ScheduleError
from ...schedules.p2p import with_messages
from ...schedules.registry import SCHEDULES
from ...schedules.rescale import resize
from ...schedules.timeline import Times

FEW_CHUNKS = 3
"""Stages of a rank where the plan has more of them: a first one, a last one and one between."""


def stage_to_rank(pipeline: Pipeline, ranks: int) -> tuple[int, ...]:
    """The rank of each stage on an axis with this number of ranks."""
    if _is_unnamed(pipeline):
        return _rows(pipeline, ranks, microbatches=1).stage_to_rank
    return stage_schedule.stage_to_rank(pipeline, ranks)


def few_microbatches(pipeline: Pipeline, ranks: int) -> int:
    """On two ranks more of them than ranks, on three fewer; more, where the schedule cannot be
    made for so few.
    """
    pipeline, least = _few_chunks(pipeline), 2
    if ranks == 2:
        least = 3
    for count in range(least, least + 2 * ranks + 1):
        try:
            _rows(pipeline, ranks, count)
        except ScheduleError:
            continue
        return count
    raise AssertionError(f"verify: no schedule {pipeline.settings.schedule.kind} on {ranks} ranks")


def _few_chunks(pipeline: Pipeline) -> Pipeline:
    """The pipeline with no more stages on a rank than tell a first, a last and another one
    apart; its layers stay.
    """
    order = pipeline.settings.schedule
    if _is_unnamed(pipeline) or (order.chunks or 0) <= FEW_CHUNKS:
        return pipeline
    return evolve(
        pipeline, settings=evolve(pipeline.settings, schedule=evolve(order, chunks=FEW_CHUNKS))
    )


def few_layers(program: Program, pipeline: Pipeline, ranks: int) -> dict[str, int]:
    """For each repeat that is cut, as many layers as its cuts need; on two ranks the last repeat
    has one more.
    """
    begun = [*_first_repeats(program, _few_chunks(pipeline), ranks).values()]
    layers = dict[str, int]()
    for number, dim in enumerate(pipeline.dims):
        layers[dim] = begun.count(number) + _before(number, ranks)
    layers[pipeline.dims[-1]] += ranks == 2
    return layers


def covers(program: Program, small: Program) -> bool:
    """Whether the values that cross the cuts of a small program are all that cross the plan's."""
    return {*_kinds(program)} <= {*_kinds(small)}


def _kinds(program: Program) -> dict[tuple[Value, ...], int]:
    """The values that cross cuts, each list once, with the first repeat where they do."""
    assert program.pipeline, "verify: no pipeline"
    begun = (stage.begins for stage in stages(program, program.pipeline)[1:])
    kinds: dict[tuple[Value, ...], int] = {}
    for number, values in zip(begun, crossing(program, program.pipeline), strict=True):
        kind = tuple(evolve(value, name=base(value.name)) for value in values)
        kinds.setdefault(kind, number)
    return kinds


def _first_repeats(program: Program, pipeline: Pipeline, ranks: int) -> dict[int, int]:
    """The number of the repeat that a stage begins in, for each stage that has layers, but the
    first.

    All repeats that should have cuts, by layers; where cuts are too few, the repeats in the middle.
    """
    _, *others = _stages_with_layers(pipeline, len(stage_to_rank(pipeline, ranks)))
    kinds, count = sorted(_kinds(program).values()), len(others)
    begun = dict[int, int]()
    for i, stage in enumerate(others):
        place = (i + 1) * len(kinds) // (count + 1)
        if count >= len(kinds):
            place = i * len(kinds) // count
        begun[stage] = kinds[place]
    return begun


def _before(number: int, ranks: int) -> int:
    """Layers of a repeat before its first cut: on two ranks one, on more none, where another
    repeat is before it.
    """
    return int(number == 0 or ranks == 2)


def _stages_with_layers(pipeline: Pipeline, count: int) -> list[int]:
    """The stages, of `count`, that have layers; all, if only stages in the middle had and there
    are none.
    """
    ends = (0, *pipeline.layers[:1]), (count - 1, *pipeline.layers[-1:])
    empty = {stage for stage, *layers in ends if layers == [0]}
    return [k for k in range(count) if k not in empty] or [*range(count)]


def _rows(pipeline: Pipeline, ranks: int, microbatches: int) -> Schedule:
    """Rows by the schedule's name; where it has none, a part of the plan's own, or these and
    more.
    """
    if _is_unnamed(pipeline):
        assert pipeline.schedule, "verify: no schedule"
        return resize(pipeline.schedule, ranks, microbatches)
    order = pipeline.settings.schedule
    return SCHEDULES[order.kind](ranks, microbatches, order.chunks)


def _is_unnamed(pipeline: Pipeline) -> bool:
    return pipeline.settings.schedule.kind not in SCHEDULES


def params_on_several_ranks(pipeline: Pipeline) -> dict[str, str]:
    """Each parameter that several ranks own, and the first that the same ranks own."""
    ranks = {name: pipeline.ranks_of(name) for name, _ in pipeline.param_stages}
    first: dict[tuple[int, ...], str] = {}
    first_alike = dict[str, str]()
    for name, owners in ranks.items():
        if len(owners) > 1:
            first_alike[name] = first.setdefault(owners, name)
    return first_alike


def recut(small: Program, program: Program, pipeline: Pipeline) -> Program:
    """The step `program` at small sizes, with the stages and rows that its pipeline has at these
    sizes.
    """
    pipeline, ranks = _few_chunks(pipeline), small.axis(pipeline.axis).size
    cut = evolve(pipeline, stage_to_rank=stage_to_rank(pipeline, ranks))
    cut = evolve(cut, layers=_layers(small, _first_repeats(program, pipeline, ranks), cut))
    cut = evolve(cut, settings=evolve(pipeline.settings, stages=cut.layers))
    rows = _rows(pipeline, ranks, small.size(MICROBATCHES))
    cut = evolve(cut, rows=rows if _is_unnamed(pipeline) else None)
    schedule = with_messages(rows, Times.uniform(rows.stages))
    cut = evolve(cut, param_stages=stages_of_params(small, cut), schedule=schedule)
    region = renumber_ranks(small.region, pipeline, evolve(small, pipeline=cut))
    return evolve(small, region=region, pipeline=cut)


def _layers(small: Program, begun: dict[int, int], pipeline: Pipeline) -> tuple[int, ...]:
    """Layers: one for each stage that begins in a repeat; for the last of them all layers up to the
    place where the next repeat begins.
    """
    ranks, sizes = small.axis(pipeline.axis).size, [small.size(dim) for dim in pipeline.dims]
    ends, filled = (
        [0, *accumulate(sizes)],
        _stages_with_layers(pipeline, len(pipeline.stage_to_rank)),
    )
    cuts: list[int] = []
    for stage in range(1, len(pipeline.stage_to_rank)):
        if stage in begun:
            number = begun[stage]
            inside = [other for other in begun if begun[other] == number].index(stage)
            cuts.append(ends[number] + _before(number, ranks) + inside)
        else:  # the one before it or it itself has no layers
            cuts.append(0 if stage in filled else ends[-1])
    return tuple(after - before for before, after in pairwise([0, *cuts, ends[-1]]))


def stages_of_params(
    program: Program, pipeline: Pipeline
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The stages that read each parameter, as forward says it."""
    return readers(program, pipeline, program.forward.body, leaves(program))


def renumber_ranks(region: Region, pipeline: Pipeline, small: Program) -> Region:
    """A step of a pipeline as a step of a small program, whose ranks have other numbers; the ranks
    of other axes stay.
    """
    assert small.pipeline, "verify: no pipeline"
    ranks, new_ranks = len({*pipeline.stage_to_rank}), len({*small.pipeline.stage_to_rank})
    owners = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]()
    for bucket in small.buckets:
        param = bucket.params[0]
        owners[bucket.dim] = pipeline.ranks_of(param), small.pipeline.ranks_of(param)
    types = evolve(small, region=region).types

    def with_ranks(op: Op, key: str, numbers: tuple[str, ...]) -> Op:
        dim = next(iter(types[op.inputs[0]].dims[-1:]), "")
        old, new = owners.get(dim, ((), ()))
        if not numbers or numbers != tuple(map(str, old)):
            return op
        attrs = tuple((name, value) for name, value in op.attrs if name != key)
        if key == "among" and len(new) == new_ranks:
            # a sum over all ranks names none
            return evolve(op, attrs=attrs)
        return evolve(op, attrs=(*attrs, (key, tuple(map(str, new)))))

    def with_new_numbers(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Op):
            return stmt
        if stmt.kind == "sum_squares":
            return with_ranks(stmt, "once", stmt.names("once"))
        if stmt.kind == "coerce" and stmt.names("axes") == (pipeline.axis,):
            among = stmt.names("among") or tuple(map(str, range(ranks)))
            return with_ranks(stmt, "among", among)
        return stmt

    return evolve(region, body=tuple(map(with_new_numbers, region.body)))
