"""The parts of each tensor that ranks write into a checkpoint, from a plan's types: each element by
one rank, once.

Purpose: who writes what, without a run; whether the parts of a tensor are the whole of it, without
overlap or gap.  A part is what the ranks of one place on the axes that split a tensor, or share out
its bucket, have of it; the first of them writes it.  Non-goals: how it is written and read (the
runtime, whose boxes are these).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import prod

from attrs import frozen

from ..ir import Bucket, Param, Program
from ..ir.stages import layers_of_rank, stages
from .bucket_layout import layout, row_length, stored_dims, stored_shape
from .stage_buckets import chunks

Extent = tuple[range, ...]
"""A part of a tensor, as stored: the indices along each dim."""

Tensor = tuple[str, int]
"""A parameter, and the layer of its repeats, counted over all of them."""

Parts = dict[Tensor, list[tuple[Extent, int]]]
"""The parts of each tensor, and the rank that writes each."""


@frozen
class _Flat:
    """A flat buffer: its parameters, as large as `sized` has them, and the layers of a repeat
    that is cut; its rank.
    """

    sized: Program
    params: tuple[str, ...]
    of_stage: Mapping[str, Sequence[int]] = {}
    place: int = 0


def written(program: Program) -> Parts:
    """The parts that ranks of a plan write into a checkpoint."""
    found = defaultdict[Tensor, list[tuple[Extent, int]]](list)
    for bucket in program.buckets:
        for flat in _flats(program, bucket):
            for tensor, extent, rank in _of_flat(program, bucket, flat):
                found[tensor].append((extent, rank))
    for buffer in program.buffers:
        whole = tuple(map(range, shape(program, buffer.name)))
        for flat in _stages_of(program, buffer):
            for layer in _layers(program, buffer, flat):
                found[buffer.name, layer].append((whole, _rank(program, {}, flat)))
    return dict(found)


def shape(program: Program, name: str) -> tuple[int, ...]:
    """The shape of one of a parameter's tensors as it is stored."""
    return stored_shape(program, next(param for param in program.stored if param.name == name))


def fault(shape: Sequence[int], extents: Sequence[Extent]) -> str:
    """Why the parts of a tensor are not the whole of it, each element once; empty if they are."""
    if sum(prod(map(len, extent)) for extent in extents) != prod(shape):
        return "the parts have more or fewer elements than the tensor"
    cuts = [
        sorted({at for extent in extents for at in (extent[dim].start, extent[dim].stop)})
        for dim in range(len(shape))
    ]
    if any(ends[0] < 0 or ends[-1] > size for ends, size in zip(cuts, shape, strict=True)):
        return "a part lies outside of the tensor"
    cells = [cell for extent in extents for cell in product(*map(_within, extent, cuts))]
    return "two parts overlap" if len({*cells}) < len(cells) else ""


def _within(part: range, cuts: Sequence[int]) -> list[int]:
    return [at for at in cuts if part.start <= at < part.stop]


def _flats(program: Program, bucket: Bucket) -> Iterator[_Flat]:
    """The buffers of a bucket: one, or in a pipeline that of each chunk, once of those that
    several ranks have.
    """
    pipeline = program.pipeline
    if not pipeline:
        yield _Flat(program, bucket.params)
        return
    all_, done = stages(program, pipeline), set[tuple[str, ...]]()
    for place, own in enumerate(chunks(program)):
        for chunk in (chunk for chunk in own if chunk.bucket == bucket.name):
            if len(pipeline.ranks_of(chunk.params[0])) > 1 and chunk.params in done:
                continue
            done.add(chunk.params)
            layers = dict(zip(pipeline.dims, all_[chunk.stages[0]].layers, strict=True))
            sized = program.sized({dim: len(each) for dim, each in layers.items()})
            yield _Flat(sized, chunk.params, layers, place)


def _stages_of(program: Program, buffer: Param) -> Iterator[_Flat]:
    """The layers of each rank along a pipeline; all of a buffer that no stage cuts."""
    pipeline = program.pipeline
    if not pipeline or buffer.type.dims[0] not in pipeline.dims:
        yield _Flat(program, ())
        return
    for place in range(program.axis(pipeline.axis).size):
        yield _Flat(program, (), layers_of_rank(program, pipeline, place), place)


def _of_flat(program: Program, bucket: Bucket, flat: _Flat) -> Iterator[tuple[Tensor, Extent, int]]:
    shards, each = program.degree(bucket.shard_axes), len(bucket.layers)
    laid = layout(flat.sized, flat.params, shards, each)
    part = laid.size // shards
    for name, start in zip(flat.params, laid.starts, strict=True):
        param = flat.sized.param(name)
        row, layers = row_length(flat.sized, param), _layers(program, param, flat)
        sizes = [
            flat.sized.local_size(param.type, dims[0]) * prod(map(program.size, dims[1:]))
            for dims in stored_dims(param)
        ]
        for number, layer in enumerate(layers):
            first = start + (0 if each else number * prod(sizes))
            for shard in range(shards):
                rows = range(
                    max(first, shard * part) - first,
                    min(first + prod(sizes), (shard + 1) * part) - first,
                )
                if rows:
                    own = range(rows.start // row, rows.stop // row)
                    for extent, rank in _places(
                        program, bucket, param, (own, *map(range, sizes[1:])), sizes, shard, flat
                    ):
                        yield (name, layer), extent, rank


def _layers(program: Program, param: Param, flat: _Flat) -> list[int]:
    """The layers that a buffer has of a parameter, counted over all of its repeats."""
    dims = param.type.dims[: param.stacked]
    own = [flat.of_stage.get(dim, range(program.size(dim))) for dim in dims]
    steps = [*accumulate(map(program.size, dims[::-1]), lambda a, b: a * b, initial=1)][:-1][::-1]
    return [sum(i * step for i, step in zip(at, steps, strict=True)) for at in product(*own)]


def _places(
    program: Program,
    bucket: Bucket,
    param: Param,
    own: Extent,
    sizes: Sequence[int],
    shard: int,
    flat: _Flat,
) -> Iterator[tuple[Extent, int]]:
    """A rank's part at each place on the axes that split a parameter, and the first rank that
    has it.
    """
    axes = [param.type.axes_of(dims[0]) for dims in stored_dims(param)]
    for places in product(*(range(program.degree(each)) for each in axes)):
        at: dict[str, int] = {}
        for names, place in [
            *zip(axes, places, strict=True),
            (_in_mesh(program, bucket.shard_axes), shard),
        ]:
            for name in reversed(names):
                place, at[name] = divmod(place, program.axis(name).size)
        moved = zip(own, places, sizes, strict=True)
        yield (
            tuple(range(r.start + place * size, r.stop + place * size) for r, place, size in moved),
            _rank(program, at, flat),
        )


def _rank(program: Program, at: Mapping[str, int], flat: _Flat) -> int:
    """The first rank at a place on some axes, with the stages of a buffer."""
    place, rank = {program.pipeline.axis: flat.place} if program.pipeline else {}, 0
    for axis in program.axes:
        rank = rank * axis.size + {**at, **place}.get(axis.name, 0)
    return rank


def _in_mesh(program: Program, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis.name for axis in program.axes if axis.name in axes)
