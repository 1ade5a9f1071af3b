"""The sizes of an elastic axis, `mesh { dp = 4..8 }`, and a program at each of them.

Purpose: nothing but `batch` is sharded over such an axis, and each rank has the same rows of a
microbatch at any size.  On fewer ranks a step has more microbatches, so that its ops are the same,
and its global batch too; a pipeline's rows are made for each number of microbatches.  Non-goals:
which ranges are legal (`frontend.elastic`).
"""

from collections.abc import Sequence
from itertools import groupby
from math import prod

from attrs import evolve

from ..config.settings import Cluster
from ..config.units import count_words
from ..ir import BATCH, MICROBATCHES, Axis, Program, once
from .bucket_layout import flat_size
from .stage_schedule import with_schedule


def elastic_axis(program: Program) -> Axis | None:
    """The axis that may have several sizes, if there is one."""
    return next((axis for axis in program.axes if axis.within), None)


def sizes(program: Program) -> tuple[int, ...]:
    """The sizes that the elastic axis may have, the largest first; none without such an axis."""
    return tuple(size for size in _range(program) if not _rest(program, size))


def get_left_out_words(program: Program) -> str:
    """The sizes of the range that a step cannot have, with the arithmetic; "" where there are none.

    For instance `dp 5, 7: 64 sequences are not microbatches of 4 on as many ranks`.
    """
    axis = elastic_axis(program)
    left = [size for size in reversed(_range(program)) if _rest(program, size)]
    if not axis or not left:
        return ""
    train, others = program.train, _data_ranks(program, 1)
    on = f"{others} times as many ranks" if others > 1 else "as many ranks"
    what = (
        f"{count_words(train.global_batch, 'sequence')} are not microbatches of {train.microbatch}"
        f" on {on}"
    )
    return f"{axis.name} {_runs(left)}: {what}"


def at_size(program: Program, size: int) -> Program:
    """The program, before or after any pass, with an elastic axis of `size` ranks."""
    axis = elastic_axis(program)
    assert axis, "elastic: no such axis"
    if size == axis.size:
        return program
    batch = program.train.microbatch * _data_ranks(program, size)
    numbers = {BATCH: batch, MICROBATCHES: program.train.global_batch // batch}
    axes = list[Axis]()
    for other in program.axes:
        axes.append(evolve(other, size=size) if other is axis else other)
    ranks_before = prod(axis.size for axis in program.axes)
    ranks = prod(axis.size for axis in axes)
    cluster = _machines(program.cluster, ranks_before, ranks)
    resized = evolve(program.with_sizes(numbers), axes=tuple(axes), cluster=cluster)
    resized = resized.with_sizes(
        {bucket.dim: flat_size(resized, bucket) for bucket in program.buckets}
    )
    pipeline = program.pipeline
    if pipeline and pipeline.schedule:
        return evolve(resized, pipeline=with_schedule(resized, pipeline))
    return resized


@once
def every_size(program: Program) -> tuple[Program, ...]:
    """The program at each size, the largest first; without an elastic axis, the program."""
    return tuple(at_size(program, size) for size in sizes(program)) or (program,)


def smallest(program: Program) -> Program:
    """The program at the least size: its ranks hold the largest parts of what all share out."""
    return every_size(program)[-1]


def elastic_words(program: Program) -> str:
    """The elastic axis and its sizes, for instance `dp 8, 6 or 4`; "" without one."""
    axis = elastic_axis(program)
    if not axis:
        return ""
    return f"{axis.name} {alternatives(sizes(program))}"


def _runs(numbers: Sequence[int]) -> str:
    """For instance `5, 7, 9 … 15`."""
    words = list[str]()
    # numbers of one run are equally far ahead of their places
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        if len(run) > 2:
            words.append(f"{run[0]} … {run[-1]}")
        else:
            words += map(str, run)
    return ", ".join(words)


def alternatives(numbers: Sequence[int]) -> str:
    """For instance `6, 4 or 2`."""
    *first, last = map(str, numbers)
    if not first:
        return last
    return f"{', '.join(first)} or {last}"


def _range(program: Program) -> range:
    """All sizes within the range, the largest first."""
    axis = elastic_axis(program)
    least, most = axis.within if axis and axis.within else (1, 0)
    return range(most, least - 1, -1)


def _rest(program: Program, size: int) -> int:
    """How many sequences of a step are left over from whole microbatches."""
    return program.train.global_batch % (program.train.microbatch * _data_ranks(program, size))


def _data_ranks(program: Program, size: int) -> int:
    """The ranks that share out a batch, where the elastic axis has `size` ranks."""
    ranks = 1
    for claim in program.claims:
        if claim.dim == BATCH:
            axis = program.axis(claim.axis)
            ranks *= size if axis.within else axis.size
    return ranks


def _machines(cluster: Cluster, ranks_before: int, ranks: int) -> Cluster:
    """The nodes for a number of ranks, as many ranks on each as before; the last one may have some
    over.

    One stays one.
    """
    if cluster.nodes == 1 and not cluster.gpus_per_node:
        return cluster
    ranks_per_node = cluster.gpus_per_node or ranks_before // cluster.nodes
    return evolve(cluster, nodes=-(-ranks // ranks_per_node), gpus_per_node=ranks_per_node)
