"""Divides a pipeline's layers into stages by their seconds, where the cluster's GPU is known.

Purpose: of stages of equal operations and stages of equal seconds of forward and backward, the ones
with which the rank that works longest works less.  Before: `validate`.  Non-goals: how a model is
cut into stages (`passes.partition_stages`).
"""

from typing import TYPE_CHECKING

from attrs import evolve

from ...ir import Pipeline
from ...passes.partition_stages import divide_layers, with_stages
from ...syntax.diagnostics import PlanError
from ..variant import Variant

if TYPE_CHECKING:
    from ...analysis.hardware import Hardware

WORTH = 0.995
"""A division is not taken if the rank that works longest takes more than this part of the time with
it.
"""


def divide_stages(plan: Variant) -> Variant:
    """The variant with its pipeline's stages.  Raises PlanError."""
    if not (pipeline := plan.program.pipeline):
        return plan
    from ...analysis.hardware import hardware

    equal = plan.with_program(with_stages(plan.program, pipeline))
    gpu = hardware(plan.program)
    if not gpu or pipeline.rows or pipeline.settings.stages is not None:
        return equal
    try:
        return _faster(plan, pipeline, equal, gpu)
    except PlanError:  # which the pass that raises it tells
        return equal


def _faster(plan: Variant, pipeline: Pipeline, equal: Variant, gpu: "Hardware") -> Variant:
    """The variant cut by seconds, if the rank that works longest then has less to do than in
    `equal`, which is cut by operations, and the step fits.
    """
    from ...analysis.stage_times import item_times  # a plan without a cluster does without

    program, cut = plan.program, equal.program.pipeline
    assert cut, "divide_stages: no stages"
    times = item_times(equal.get_program_after("place_state"), cut, gpu)
    of_groups = tuple(round(seconds * 1e9) for seconds in times.groups)
    of_layers = tuple(round(seconds * 1e9) for seconds in times.layers)
    layers = divide_layers(program, pipeline, of_groups, of_layers, len(cut.layers))
    now = times.longest(program, cut)
    then = times.longest(program, evolve(cut, layers=layers))
    if then > WORTH * now:
        return equal
    faster = plan.with_program(with_stages(program, pipeline, layers))
    if layers[0] <= cut.layers[0] and max(layers) <= max(cut.layers):
        return faster  # the first rank, which holds most microbatches, needs no more memory
    return equal if faster.fits is False else faster
