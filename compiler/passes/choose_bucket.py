"""Chooses the size of buckets that makes a step fastest, where a plan says `bucket = auto`.

Purpose: of powers of two, up to one bucket for all that is reduced alike, and of no size, the one
of least seconds with which a rank has enough memory; the smallest of equal ones.  No size where the
speed of the cluster's GPU is not known.  Before: `place_stages`.  Non-goals: how sizes make buckets
(`bucket_params`).
"""

from typing import TYPE_CHECKING

from attrs import evolve

from ..analysis.elastic import smallest
from ..analysis.memory import account, fits
from ..config.settings import AUTO, Size
from ..ir import ITEM_BYTES, Program
from .bucket_params import fuse_buckets
from .schedule_pipeline import schedule_pipeline

if TYPE_CHECKING:
    from ..analysis.hardware import Hardware

LEAST = 4 << 20
"""The smallest size: of smaller messages, latency is a large share."""


def choose_bucket(program: Program) -> Program:
    """The program with the size in its settings."""
    if program.flow.bucket != AUTO:
        return program
    from ..analysis.hardware import hardware  # a plan without `auto` does without

    on = hardware(program)
    return _fastest(program, on) if on else _sized(program, None)


def _fastest(program: Program, on: "Hardware") -> Program:
    """The program with the size of least seconds, of those with which it fits, if there are any."""
    from ..analysis.time.step import step_time

    distinct = dict[object, tuple[Program, Program]]()
    for size in (*_sizes(program), None):
        made = _sized(program, size)
        fused = fuse_buckets(made)
        distinct.setdefault(fused.buckets, (made, fused))
    lowered = [(made, schedule_pipeline(fused)) for made, fused in distinct.values()]
    lowered.sort(key=lambda it: step_time(it[1], on).seconds)
    return next((made for made, last in lowered if _fits(last)), lowered[0][0])


def _sizes(program: Program) -> list[int]:
    """Powers of two, up to the first that is enough for all gradients of a rank."""
    whole = sum(
        program.elements(param.type) * ITEM_BYTES[param.type.dtype] for param in program.params
    )
    sizes = [LEAST]
    while sizes[-1] < whole:
        sizes.append(2 * sizes[-1])
    return sizes


def _sized(program: Program, size: int | None) -> Program:
    return evolve(program, flow=evolve(program.flow, bucket=size))


def _fits(program: Program) -> bool:
    """Whether a rank's GPU has enough memory, and rows of `schedule = auto` keep to their bytes."""
    it, pipeline = account(smallest(program)), program.pipeline
    most = pipeline.settings.schedule.memory if pipeline else None
    return fits(program, it) is not False and (not isinstance(most, Size) or it.total <= most.bytes)
