"""A pipeline at small sizes: its stages with few layers each, its rows for few microbatches.

On few ranks the same kinds of stages: a first and a last one that have layers if the plan's have,
one that has more layers than the others, and cuts where as different values cross as at the
plan's.  Ranks that the step names by their numbers are the small pipeline's.
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
from ...schedules.rescale import resized
from ...schedules.timeline import Times

FEW_CHUNKS = 3
"""Stages of a rank where the plan has more of them: a first one, a last one and one between."""


def stage_to_rank(pipeline: Pipeline, ranks: int) -> tuple[int, ...]:
    """The rank of each stage on an axis with this number of ranks."""
    return (
        _rows(pipeline, ranks, microbatches=1).stage_to_rank
        if _is_unnamed(pipeline)
        else stage_schedule.stage_to_rank(pipeline, ranks)
    )


def few_microbatches(pipeline: Pipeline, ranks: int) -> int:
    """On two ranks more of them than ranks, on three fewer; more, where the schedule cannot be
    made for these.
    """
    pipeline, least = _few_chunks(pipeline), 3 if ranks == 2 else 2
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
    """For each repeat that is cut, as many as its cuts need; on two ranks one more after the
    last of them.
    """
    begun = [*_begun(program, _few_chunks(pipeline), ranks).values()]
    least = (begun.count(number) + _before(number, ranks) for number in range(len(pipeline.dims)))
    found = dict(zip(pipeline.dims, least, strict=True))
    return found | {pipeline.dims[-1]: found[pipeline.dims[-1]] + (ranks == 2)}


def covers(program: Program, small: Program) -> bool:
    """Whether what crosses the cuts of a small program is all that crosses the plan's."""
    return {*_kinds(program)} <= {*_kinds(small)}


def _kinds(program: Program) -> dict[tuple[Value, ...], int]:
    """The values that cross cuts, each list once, and the first repeat in which they do."""
    assert program.pipeline, "verify: no pipeline"
    begun = (stage.begins for stage in stages(program, program.pipeline)[1:])
    found: dict[tuple[Value, ...], int] = {}
    for number, values in zip(begun, crossing(program, program.pipeline), strict=True):
        found.setdefault(tuple(evolve(value, name=base(value.name)) for value in values), number)
    return found


def _begun(program: Program, pipeline: Pipeline, ranks: int) -> dict[int, int]:
    """For each stage that has layers, but the first that does, the repeat, by number, in which it
    begins.

    All repeats that should have cuts, by layers; where cuts are too few, those in the middle of
    them.
    """
    _, *others = _filled(pipeline, len(stage_to_rank(pipeline, ranks)))
    kinds, count = sorted(_kinds(program).values()), len(others)
    enough = count >= len(kinds)
    places = (
        i * len(kinds) // count if enough else (i + 1) * len(kinds) // (count + 1)
        for i in range(count)
    )
    return dict(zip(others, (kinds[place] for place in places), strict=True))


def _before(number: int, ranks: int) -> int:
    """Layers of a repeat before its first cut: on two ranks one, on more none, where another
    repeat is before it.
    """
    return int(number == 0 or ranks == 2)


def _filled(pipeline: Pipeline, count: int) -> list[int]:
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
        return resized(pipeline.schedule, ranks, microbatches)
    order = pipeline.settings.schedule
    return SCHEDULES[order.kind](ranks, microbatches, order.chunks)


def _is_unnamed(pipeline: Pipeline) -> bool:
    return pipeline.settings.schedule.kind not in SCHEDULES


def shared(pipeline: Pipeline) -> dict[str, str]:
    """Each parameter that several ranks own, and the first that the same ranks own."""
    ranks = {name: pipeline.ranks_of(name) for name, _ in pipeline.param_stages}
    first: dict[tuple[int, ...], str] = {}
    return {name: first.setdefault(own, name) for name, own in ranks.items() if len(own) > 1}


def recut(small: Program, program: Program, pipeline: Pipeline) -> Program:
    """The step `program` at small sizes, with the stages and rows that its pipeline has at
    these.
    """
    pipeline, ranks = _few_chunks(pipeline), small.axis(pipeline.axis).size
    found = evolve(pipeline, stage_to_rank=stage_to_rank(pipeline, ranks))
    found = evolve(found, layers=_layers(small, _begun(program, pipeline, ranks), found))
    found = evolve(found, settings=evolve(pipeline.settings, stages=found.layers))
    rows = _rows(pipeline, ranks, small.size(MICROBATCHES))
    found = evolve(found, given=rows if _is_unnamed(pipeline) else None)
    schedule = with_messages(rows, Times.uniform(rows.stages))
    found = evolve(found, param_stages=stages_of_params(small, found), schedule=schedule)
    return evolve(
        small,
        region=renumbered(small.region, pipeline, evolve(small, pipeline=found)),
        pipeline=found,
    )


def _layers(small: Program, begun: dict[int, int], pipeline: Pipeline) -> tuple[int, ...]:
    """Layers: one for each stage that begins in a repeat, and for the last of them all to where
    the next one begins.
    """
    ranks, sizes = small.axis(pipeline.axis).size, [small.size(dim) for dim in pipeline.dims]
    ends, filled = [0, *accumulate(sizes)], _filled(pipeline, len(pipeline.stage_to_rank))
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


def renumbered(region: Region, pipeline: Pipeline, small: Program) -> Region:
    """A step of a pipeline as one of a small program, whose ranks have other numbers; those of
    other axes stay.
    """
    assert small.pipeline, "verify: no pipeline"
    ranks, new_ranks = len({*pipeline.stage_to_rank}), len({*small.pipeline.stage_to_rank})
    firsts = {bucket.dim: bucket.params[0] for bucket in small.buckets}
    owners = {
        dim: (pipeline.ranks_of(param), small.pipeline.ranks_of(param))
        for dim, param in firsts.items()
    }
    types = evolve(small, region=region).types

    def changed(op: Op, key: str, named: tuple[str, ...]) -> Op:
        dim = next(iter(types[op.inputs[0]].dims[-1:]), "")
        old, new = owners.get(dim, ((), ()))
        if not named or named != tuple(map(str, old)):
            return op
        attrs = tuple((name, value) for name, value in op.attrs if name != key)
        all_ = key == "among" and len(new) == new_ranks
        return evolve(op, attrs=attrs if all_ else (*attrs, (key, tuple(map(str, new)))))

    def numbered(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Op) and stmt.kind == "sum_squares":
            return changed(stmt, "once", stmt.names("once"))
        if (
            isinstance(stmt, Op)
            and stmt.kind == "coerce"
            and stmt.names("axes") == (pipeline.axis,)
        ):
            return changed(stmt, "among", stmt.names("among") or tuple(map(str, range(ranks))))
        return stmt

    return evolve(region, body=tuple(map(numbered, region.body)))
