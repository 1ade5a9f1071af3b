"""The seconds of a pipeline's stages on the cluster's GPU: layers are divided and rows are made by
them.

Non-goals: pipelines on GPUs that nobody has measured, which go by operations
(`stage_schedule.estimate_times`).
"""

from functools import partial

from attrs import evolve, frozen

from ..ir import Pipeline, Program
from ..ir.stages import groups, stages
from ..schedules.actions import Work
from ..schedules.timeline import Times
from .hardware import Hardware
from .stage_schedule import LEAST
from .time.pipeline_parts import cuts, get_stage_clocks
from .time.prices import prices
from .time.timeline import seconds_of


@frozen
class ItemTimes:
    """Seconds of forward and backward: of each group of ops between repeats that are cut, and
    of a layer of each repeat.
    """

    groups: tuple[float, ...]
    layers: tuple[float, ...]

    def longest(self, program: Program, pipeline: Pipeline) -> float:
        """The seconds of a microbatch on the rank that works longest, as the pipeline's layers
        are divided.
        """
        seconds_by_rank = [0.0] * program.axis(pipeline.axis).size
        for stage, rank in zip(stages(program, pipeline), pipeline.stage_to_rank, strict=True):
            seconds_by_rank[rank] += sum(self.groups[group] for group in stage.groups)
            seconds_by_rank[rank] += sum(
                len(numbers) * layer
                for numbers, layer in zip(stage.layers, self.layers, strict=True)
            )
        return max(seconds_by_rank)


def item_times(program: Program, pipeline: Pipeline, on: Hardware) -> ItemTimes:
    """The times of what stages are made of, in a program after `place_state`."""
    seconds = partial(seconds_of, program, on, prices(program, on))
    ahead, repeats = groups(pipeline, program.forward.body)
    back, mirrored = groups(pipeline, program.backward.body)
    group_seconds, layer_seconds = list[float](), list[float]()
    for first, second in zip(ahead, reversed(back), strict=True):
        group_seconds.append(seconds(first) + seconds(second))
    for repeat, backward in zip(repeats, reversed(mirrored), strict=True):
        layer_seconds.append(seconds(repeat.body) + seconds(backward.body))
    return ItemTimes(tuple(group_seconds), tuple(layer_seconds))


def stage_times(program: Program, pipeline: Pipeline, on: Hardware) -> Times:
    """The times of actions and messages, in parts of the longest forward; backward is in two
    parts.
    """
    program = evolve(program, pipeline=pipeline)
    clocks = get_stage_clocks(program, on, splits=True)
    unit = max(parts[Work.FORWARD].gpu for parts in clocks)
    forward, input, weight = list[float](), list[float](), list[float]()
    for parts in clocks:
        forward.append(max(parts[Work.FORWARD].gpu / unit, LEAST))
        input.append(max(parts[Work.INPUT].gpu / unit, LEAST))
        weight.append(max(parts[Work.WEIGHT].gpu / unit, LEAST))
    longest_cut = max(cuts(program, pipeline, on))
    return Times(tuple(forward), tuple(input), tuple(weight), longest_cut / unit)
