"""The parts of each tensor that ranks write into a checkpoint, from a plan's types: each element by
one rank, once.

Purpose: who writes what, without a run; whether the parts of a tensor are the whole of it, without
overlap or gap.  Axes split a tensor, or share out its bucket.  The ranks at one place on these axes
have the same part of it, and the first of them writes it.  Non-goals: how it is written and read
(the runtime, whose boxes are these).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from attrs import frozen

from ...compiler.analysis.bucket_layout import get_stored_dims, get_stored_shape, layout, row_length
from ...compiler.analysis.stage_buckets import chunks
from ...compiler.ir import Bucket, Param, Program
from ...compiler.ir.stages import layers_of_rank, stages

Extent = tuple[range, ...]
"""A part of a tensor, as stored: the indices along each dim."""

Tensor = tuple[str, int]
"""A parameter, and the layer of its repeats, counted over all of them."""

Parts = dict[Tensor, list[tuple[Extent, int]]]
"""The parts of each tensor, and the rank that writes each."""


@frozen
class _Flat:
    """A flat buffer: its parameters, as large as `sized` has them, the layers of each repeat
    that is cut, and its rank along the pipeline's axis.
    """

    sized: Program
    params: tuple[str, ...]
    layers_by_dim: Mapping[str, Sequence[int]] = {}
    place: int = 0


def get_written_parts(program: Program) -> Parts:
    """The parts that ranks of a plan write into a checkpoint."""
    parts = defaultdict[Tensor, list[tuple[Extent, int]]](list)
    for bucket in program.buckets:
        for flat in _flats(program, bucket):
            for tensor, extent, rank in _parts_of_flat(program, bucket, flat):
                parts[tensor].append((extent, rank))
    for buffer in program.buffers:
        whole = tuple(map(range, shape(program, buffer.name)))
        for flat in _stages_of(program, buffer):
            for layer in _layers(program, buffer, flat):
                parts[buffer.name, layer].append((whole, _rank(program, {}, flat)))
    return dict(parts)


def shape(program: Program, name: str) -> tuple[int, ...]:
    """The shape of one of a parameter's tensors as it is stored."""
    return get_stored_shape(
        program, next(param for param in program.params_and_buffers if param.name == name)
    )


def fault(shape: Sequence[int], extents: Sequence[Extent]) -> str:
    """Why the parts of a tensor are not the whole of it, each element once; empty if they are."""
    if sum(prod(map(len, extent)) for extent in extents) != prod(shape):
        return "the parts have more or fewer elements than the tensor"
    cuts = list[list[int]]()  # by dim, where parts begin or end
    for dim, size in enumerate(shape):
        ends = set[int]()
        for extent in extents:
            ends.update((extent[dim].start, extent[dim].stop))
        cuts.append(sorted(ends))
        if min(ends) < 0 or max(ends) > size:
            return "a part lies outside of the tensor"
    cells = list[tuple[int, ...]]()
    for extent in extents:
        cells += product(*map(_within, extent, cuts))
    return "two parts overlap" if len({*cells}) < len(cells) else ""


def _within(part: range, cuts: Sequence[int]) -> list[int]:
    return [cut for cut in cuts if part.start <= cut < part.stop]


def _flats(program: Program, bucket: Bucket) -> Iterator[_Flat]:
    """The buffers of a bucket: one, or in a pipeline one for each chunk; a chunk that several
    ranks have is there once.
    """
    pipeline = program.pipeline
    if not pipeline:
        yield _Flat(program, bucket.params)
        return
    all_stages, seen = stages(program, pipeline), set[tuple[str, ...]]()
    for place, rank_chunks in enumerate(chunks(program)):
        for chunk in rank_chunks:
            if chunk.bucket != bucket.name:
                continue
            if len(pipeline.ranks_of(chunk.params[0])) > 1 and chunk.params in seen:
                continue
            seen.add(chunk.params)
            layers = dict(zip(pipeline.dims, all_stages[chunk.stages[0]].layers, strict=True))
            sized = program.with_sizes({dim: len(numbers) for dim, numbers in layers.items()})
            yield _Flat(sized, chunk.params, layers, place)


def _stages_of(program: Program, buffer: Param) -> Iterator[_Flat]:
    """The layers of each rank along a pipeline; all of a buffer that no stage cuts."""
    pipeline = program.pipeline
    if not pipeline or buffer.type.dims[0] not in pipeline.dims:
        yield _Flat(program, ())
        return
    for place in range(program.axis(pipeline.axis).size):
        yield _Flat(program, (), layers_of_rank(program, pipeline, place), place)


def _parts_of_flat(
    program: Program, bucket: Bucket, flat: _Flat
) -> Iterator[tuple[Tensor, Extent, int]]:
    """The parts of tensors in a flat buffer, each with the first rank that has it."""
    shards, stacked = program.degree(bucket.shard_axes), len(bucket.layers)
    buffer_layout = layout(flat.sized, flat.params, shards, stacked)
    part = buffer_layout.size // shards
    for name, start in zip(flat.params, buffer_layout.starts, strict=True):
        param = flat.sized.param(name)
        row = row_length(flat.sized, param)
        sizes = list[int]()
        for dims in get_stored_dims(param):
            size = flat.sized.local_size(param.type, dims[0])
            sizes.append(size * prod(map(program.size, dims[1:])))
        elements = prod(sizes)
        for number, layer in enumerate(_layers(program, param, flat)):
            # a buffer of one layer has each layer at the same place
            first = start if stacked else start + number * elements
            for shard in range(shards):
                begin = max(first, shard * part) - first
                end = min(first + elements, (shard + 1) * part) - first
                if begin >= end:
                    continue
                extent = (range(begin // row, end // row), *map(range, sizes[1:]))
                for moved, rank in _places(program, bucket, param, extent, sizes, shard, flat):
                    yield (name, layer), moved, rank


def _layers(program: Program, param: Param, flat: _Flat) -> list[int]:
    """The layers that a buffer has of a parameter, counted over all of its repeats."""
    layers = [0]
    for dim in param.type.dims[: param.stacked]:
        size = program.size(dim)
        numbers = flat.layers_by_dim.get(dim, range(size))
        layers = [layer * size + number for layer, number in product(layers, numbers)]
    return layers


def _places(
    program: Program,
    bucket: Bucket,
    param: Param,
    extent: Extent,
    sizes: Sequence[int],
    shard: int,
    flat: _Flat,
) -> Iterator[tuple[Extent, int]]:
    """A rank's part at each place on the axes that split a parameter, and the first rank that
    has it.
    """
    axes = [param.type.axes_of(dims[0]) for dims in get_stored_dims(param)]
    shard_axes = _in_mesh(program, bucket.shard_axes)
    for places in product(*(range(program.degree(names)) for names in axes)):
        place_by_axis: dict[str, int] = {}
        for names, place in [*zip(axes, places, strict=True), (shard_axes, shard)]:
            for name in reversed(names):
                place, place_by_axis[name] = divmod(place, program.axis(name).size)
        moved = list[range]()
        for part, place, size in zip(extent, places, sizes, strict=True):
            moved.append(range(part.start + place * size, part.stop + place * size))
        yield tuple(moved), _rank(program, place_by_axis, flat)


def _rank(program: Program, place_by_axis: Mapping[str, int], flat: _Flat) -> int:
    """The first rank at a place on some axes, with the stages of a buffer."""
    places = {**place_by_axis}
    if program.pipeline:
        places[program.pipeline.axis] = flat.place
    rank = 0
    for axis in program.axes:
        rank = rank * axis.size + places.get(axis.name, 0)
    return rank


def _in_mesh(program: Program, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis.name for axis in program.axes if axis.name in axes)
