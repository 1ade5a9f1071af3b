"""Where parameters lie in a flat bucket: one after the other, and where ranks share it out, cut
between rows.

Purpose: equal shards, each of whole rows of its tensors, so that every piece of every tensor is a
box.  A tensor begins at a multiple of its row's length, and a shard is a multiple of the lengths of
all rows, so that a cut falls between rows.  Non-goals: which parameters share a bucket
(`passes.bucket_params`).  The runtime lays out its memory by the same rule.
"""

from math import lcm, prod

from attrs import frozen

from ..ir import Bucket, Param, Program


@frozen
class Layout:
    """Where each parameter of a bucket begins, where the last one ends, and the size of all; in
    elements of a rank.
    """

    starts: tuple[int, ...]
    end: int
    size: int


def layout(program: Program, params: tuple[str, ...], shards: int, layers: int = 0) -> Layout:
    """The layout of parameters in `shards` parts, or of one layer's slices of them, where
    `layers` dims are stacked.
    """
    param_by_name = {param.name: param for param in program.params}
    starts: list[int] = []
    end, unit = 0, 1
    for name in params:
        param = param_by_name[name]
        row = 1
        if shards > 1:
            row = row_length(program, param)
            unit = lcm(unit, row)
        starts.append(-(-end // row) * row)
        slices = prod(map(program.size, param.type.dims[:layers]))
        end = starts[-1] + program.elements(param.type) // slices
    if shards == 1:
        return Layout(tuple(starts), end, end)
    return Layout(tuple(starts), end, -(-end // (shards * unit)) * shards * unit)


def layout_of(program: Program, bucket: Bucket) -> Layout:
    """The layout of a bucket, or of each of its layers."""
    return layout(program, bucket.params, program.degree(bucket.shard_axes), len(bucket.layers))


def flat_size(program: Program, bucket: Bucket) -> int:
    """The size of a bucket's flat dim over all ranks that hold a part of it."""
    return layout_of(program, bucket).size * count_layouts(program, bucket)


def count_layouts(program: Program, bucket: Bucket) -> int:
    """How many layouts a bucket's flat dim has: one for each part of its parameters that axes
    of the model split.
    """
    split = [axis for axis in bucket.type.axes_of(bucket.dim) if axis not in bucket.shard_axes]
    return program.degree(tuple(split))


def row_length(program: Program, param: Param) -> int:
    """The elements in one row of a parameter as it is stored: of one index of its first dim,
    repeats apart.
    """
    dims = param.type.dims[param.stacked :]
    inner = dims[-param.inner :] if is_stored_as_matrix(param) else dims[1:]
    return prod(program.local_size(param.type, dim) for dim in inner)


def get_stored_dims(param: Param) -> list[tuple[str, ...]]:
    """The dims of each dim of a parameter as it is stored, repeats apart."""
    dims = param.type.dims[param.stacked :]
    if not is_stored_as_matrix(param):
        return [(dim,) for dim in dims]
    return [dims[: -param.inner], dims[-param.inner :]]


def get_stored_shape(program: Program, param: Param) -> tuple[int, ...]:
    """The global shape of a parameter as it is stored, repeats apart."""
    return tuple(prod(map(program.size, dims)) for dims in get_stored_dims(param))


def is_stored_as_matrix(param: Param) -> bool:
    """Whether outer and inner dims are joined in storage: a sharded dim must lead the dims that it
    is joined with.
    """
    dims = param.type.dims
    leading = (dims[param.stacked], dims[-param.inner])
    return bool(param.inner) and all(place.dim in leading for _, place in param.type.places)
