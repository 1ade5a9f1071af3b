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

    gpu = hardware(program)
    if not gpu:
        return _with_bucket_size(program, None)
    return _fastest(program, gpu)


def _fastest(program: Program, gpu: "Hardware") -> Program:
    """The program with the size of least seconds, among the sizes with which it fits, if any."""
    from ..analysis.time.step import step_time

    # sizes that make the same buckets count once, as the first of them
    distinct = dict[object, tuple[Program, Program]]()
    for size in (*_sizes(program), None):
        sized = _with_bucket_size(program, size)
        fused = fuse_buckets(sized)
        distinct.setdefault(fused.buckets, (sized, fused))
    lowered = [(sized, schedule_pipeline(fused)) for sized, fused in distinct.values()]
    lowered.sort(key=lambda pair: step_time(pair[1], gpu).seconds)
    for sized, last in lowered:
        if _fits(last):
            return sized
    return lowered[0][0]


def _sizes(program: Program) -> list[int]:
    """Powers of two, up to the first that is enough for all gradients of a rank."""
    whole = 0
    for param in program.params:
        whole += program.elements(param.type) * ITEM_BYTES[param.type.dtype]
    sizes = [LEAST]
    while sizes[-1] < whole:
        sizes.append(2 * sizes[-1])
    return sizes


def _with_bucket_size(program: Program, size: int | None) -> Program:
    return evolve(program, flow=evolve(program.flow, bucket=size))


def _fits(program: Program) -> bool:
    """Whether a rank's GPU has enough memory, and rows of `schedule = auto` keep to their bytes."""
    memory, pipeline = account(smallest(program)), program.pipeline
    if fits(program, memory) is False:
        return False
    most = pipeline.settings.schedule.memory if pipeline else None
    return not isinstance(most, Size) or memory.total <= most.bytes
