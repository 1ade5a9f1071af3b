"""Chooses the size of buckets that makes a step fastest, where a plan says `bucket = auto`.

Purpose: of powers of two, up to one bucket for all that is reduced alike, and of no size, the one
of least seconds with which a rank has enough memory; the smallest of equal ones.  No size where the
speed of the cluster's GPU is not known.  Before: `place_stages`.  Non-goals: how sizes make buckets
(`bucket_params`).
"""

from typing import TYPE_CHECKING

from attrs import evolve

from ...config.settings import AUTO, Size
from ...ir import ITEM_BYTES, Program
from ...passes.bucket_params import fuse_buckets
from ..variant import Variant

if TYPE_CHECKING:
    from ...analysis.hardware import Hardware

LEAST = 4 << 20
"""The smallest size: of smaller messages, latency is a large share."""


def choose_bucket(plan: Variant) -> Variant:
    """The variant with buckets, of the size that the plan says or of the fastest that fits."""
    if plan.program.flow.bucket != AUTO:
        return plan.with_program(fuse_buckets(plan.program))
    from ...analysis.hardware import hardware  # a plan without `auto` does without

    gpu = hardware(plan.program)
    if not gpu:
        return _with_buckets(plan, None)
    return _fastest(plan, gpu)


def _fastest(plan: Variant, gpu: "Hardware") -> Variant:
    """The variant with the size of least seconds, among the sizes with which it fits, if any."""
    # sizes that make the same buckets count once, as the first of them
    distinct = dict[object, Variant]()
    for size in (*_sizes(plan.program), None):
        fused = _with_buckets(plan, size)
        distinct.setdefault(fused.program.buckets, fused)
    variants = sorted(distinct.values(), key=lambda variant: variant.get_step_time(gpu).seconds)
    for variant in variants:
        if _fits(variant):
            return variant
    return variants[0]


def _sizes(program: Program) -> list[int]:
    """Powers of two, up to the first that is enough for all gradients of a rank."""
    whole = 0
    for param in program.params:
        whole += program.elements(param.type) * ITEM_BYTES[param.type.dtype]
    sizes = [LEAST]
    while sizes[-1] < whole:
        sizes.append(2 * sizes[-1])
    return sizes


def _with_buckets(plan: Variant, size: int | None) -> Variant:
    """The variant with buckets of a size; without one, with a bucket for all that is alike."""
    sized = evolve(plan.program, flow=evolve(plan.program.flow, bucket=size))
    return plan.with_program(fuse_buckets(sized))


def _fits(variant: Variant) -> bool:
    """Whether a rank's GPU has enough memory, and rows of `schedule = auto` keep to their bytes."""
    if variant.fits is False:
        return False
    pipeline = variant.last.pipeline
    most = pipeline.settings.schedule.memory if pipeline else None
    return not isinstance(most, Size) or variant.memory.total <= most.bytes
