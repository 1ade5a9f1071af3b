"""The seconds of a pipeline's stages on the cluster's GPU, by which layers are divided and rows are
made.

Non-goals: pipelines on GPUs that nobody has measured, which go by operations
(`stage_schedule.estimated`).
"""

from functools import partial

from attrs import evolve, frozen

from ..ir import Pipeline, Program
from ..ir.stages import groups, stages
from ..schedules.actions import Work
from ..schedules.timeline import Times
from .hardware import Hardware
from .stage_schedule import LEAST
from .time.pipeline_parts import cuts, of_stages
from .time.prices import prices
from .time.timeline import seconds_of


@frozen
class ItemTimes:
    """Seconds of forward and backward: of each group of ops between repeats that are cut, and
    of a layer of each.
    """

    groups: tuple[float, ...]
    layers: tuple[float, ...]

    def longest(self, program: Program, pipeline: Pipeline) -> float:
        """The seconds of a microbatch on the rank that works longest, as the pipeline's layers
        are divided.
        """
        of_ranks = [0.0] * program.axis(pipeline.axis).size
        for stage, rank in zip(stages(program, pipeline), pipeline.stage_to_rank, strict=True):
            of_ranks[rank] += sum(self.groups[i] for i in stage.groups)
            of_ranks[rank] += sum(
                len(own) * each for own, each in zip(stage.layers, self.layers, strict=True)
            )
        return max(of_ranks)


def item_times(program: Program, pipeline: Pipeline, on: Hardware) -> ItemTimes:
    """The times of what stages are made of, in a program after `place_state`."""
    of = prices(program, on)
    seconds = partial(seconds_of, program, on, of)
    ahead, repeats = groups(pipeline, program.forward.body)
    back, mirrored = groups(pipeline, program.backward.body)
    return ItemTimes(
        tuple(
            seconds(first) + seconds(second)
            for first, second in zip(ahead, reversed(back), strict=True)
        ),
        tuple(
            seconds(a.body) + seconds(b.body)
            for a, b in zip(repeats, reversed(mirrored), strict=True)
        ),
    )


def stage_times(program: Program, pipeline: Pipeline, on: Hardware) -> Times:
    """The times of actions and messages, in parts of the longest forward; backward is in two
    parts.
    """
    program = evolve(program, pipeline=pipeline)
    of = of_stages(program, on, splits=True)
    unit = max(each[Work.FORWARD].gpu for each in of)
    forward, input, weight = (
        tuple(max(each[work].gpu / unit, LEAST) for each in of)
        for work in (Work.FORWARD, Work.INPUT, Work.WEIGHT)
    )
    return Times(forward, input, weight, max(cuts(program, pipeline, on)) / unit)
