"""The parameters of each pipeline rank and the flat buckets of all ranks; parameters that a
rank lacks are noise.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from attrs import evolve

from ..analysis.bucket_layout import Layout, count_layouts
from ..analysis.bucket_layout import layout_of as layout_in_rows
from ..ir import INVARIANT, PARTIAL, Bucket, Param, Pipeline, Program, sharded
from ..ir.stages import layers_of_rank
from .simulated_mesh import SimulatedMesh
from .tensors import RANDOM, Array, Numbers, Tensor, degree_of


def layout_of(program: Program, bucket: Bucket) -> Layout:
    """The layout of a bucket, or of each of its layers, at small sizes: ranks share it out between
    any two elements.

    The lengths of rows have few common divisors at small sizes.  Shards of whole rows would give
    most ranks padding alone, and be several times as large as the parameters.
    """
    in_rows = layout_in_rows(program, bucket)
    shards = program.degree(bucket.shard_axes)
    return evolve(in_rows, size=-(-in_rows.end // shards) * shards)


def flat_size(program: Program, bucket: Bucket) -> int:
    """The size of a bucket's flat dim at small sizes, over all ranks that hold a part of it."""
    return layout_of(program, bucket).size * count_layouts(program, bucket)


def noise(x: Tensor, name: str, n: Numbers) -> Array:
    """The noise in place of elements of `x` that a rank does not own."""
    shape = x.array.shape[x.lead :]
    drawn = n.random(shape, f"nothing of {name}")
    return drawn.reshape(len(drawn), *(1,) * (x.lead - 1), *shape)


def ownership_mask(program: Program, world: SimulatedMesh, name: str) -> Tensor:
    """One where a rank owns an element of a parameter, else zero."""
    param, pipeline = program.param(name), program.pipeline
    assert pipeline, "verify: every rank owns everything"
    shape = world.shape(param.type)
    array = np.zeros((world.axes[pipeline.axis], *shape), int)
    for rank in range(len(array)):
        array[rank][_owned_indices(program, pipeline, param, rank)] = 1
    along = (size if axis == pipeline.axis else 1 for axis, size in world.axes.items())
    return Tensor(param.type.dims, array.reshape(1, *along, *shape))


def _owned_indices(
    program: Program, pipeline: Pipeline, param: Param, rank: int
) -> Sequence[int] | slice:
    """The indices that a rank owns along the first dim of a parameter."""
    if param.name not in dict(pipeline.param_stages):
        return layers_of_rank(program, pipeline, rank)[param.type.dims[0]]
    if rank in pipeline.ranks_of(param.name):
        return slice(None)
    return []


def with_noise(program: Program, world: SimulatedMesh, name: str, x: Tensor, n: Numbers) -> Tensor:
    """A parameter on the ranks, noise where they own nothing."""
    mask = ownership_mask(program, world, name)
    return Tensor(x.dims, np.where(mask.array > 0, x.array, noise(x, name, n)), RANDOM)


def copy_from_owner(program: Program, world: SimulatedMesh, name: str, x: Tensor) -> Tensor:
    """A parameter on the ranks; where one owns nothing, the first owner's."""
    pipeline = program.pipeline
    assert pipeline, "verify: every rank owns everything"
    axis = 1 + list(world.axes).index(pipeline.axis)
    mask, array = np.broadcast_arrays(ownership_mask(program, world, name).array > 0, x.array)
    first = np.take_along_axis(array, mask.argmax(axis=axis, keepdims=True), axis=axis)
    return Tensor(x.dims, np.where(mask, array, first), x.degree)


def pack_bucket(
    program: Program, bucket: Bucket, tensors: Sequence[Tensor], *, without_padding: bool = False
) -> Tensor:
    """The flat buffer of a layer's tensors, or the stack of all layers' of stacks; zero where no
    tensor lies.

    `without_padding` it ends with the last tensor.
    """
    layout = layout_of(program, bucket)
    count = len(bucket.layers)
    layers = bucket.layers if tensors[0].dims[:count] == bucket.layers else ()
    lead = np.broadcast_shapes(*(x.array.shape[: x.lead + len(layers)] for x in tensors))
    size = layout.end if without_padding else layout.size
    flat = np.zeros((*lead, size), tensors[0].array.dtype)
    for x, start in zip(tensors, layout.starts, strict=True):
        part = x.array.reshape(*x.array.shape[: x.lead + len(layers)], -1)
        flat[..., start : start + part.shape[-1]] = part
    return Tensor((*layers, bucket.dim), flat, degree_of(tensors))


def parts(
    program: Program,
    world: SimulatedMesh,
    bucket: Bucket,
    flat: Tensor,
    *,
    without_padding: bool = False,
) -> list[Tensor]:
    """The parameters' parts of a layer's buffer, or of the stack of all; `without_padding` as in
    `packed`.

    Raises ValueError at other sizes.
    """
    layout = layout_of(program, bucket)
    size = layout.end if without_padding else layout.size
    if flat.array.shape[-1] != size:
        raise ValueError(f"{flat.array.shape[-1]} elements are not a whole bucket")
    layers = flat.dims[:-1]
    skipped = len(bucket.layers) - len(layers)
    types = {param.name: param.type for param in program.params}
    tensors: list[Tensor] = []
    for name, start in zip(bucket.params, layout.starts, strict=True):
        type = evolve(types[name], dims=types[name].dims[skipped:])
        shape = world.shape(type)
        part = flat.array[..., start : start + prod(shape[len(layers) :])]
        array = part.reshape(*part.shape[: flat.lead], *shape)
        tensors.append(Tensor(type.dims, array, flat.degree))
    return tensors


def pad_shard(
    program: Program, world: SimulatedMesh, bucket: Bucket, flat: Tensor, n: Numbers
) -> Tensor:
    """A rank's part of a bucket in its place among zeros; a bucket that is not shared out as it
    is.
    """
    if not bucket.shard_axes:
        return flat
    return world.coerce(flat, bucket.shard_axes, sharded(bucket.dim), PARTIAL, n)


def to_shards(
    program: Program, world: SimulatedMesh, bucket: Bucket, tensors: Sequence[Tensor], n: Numbers
) -> list[Tensor]:
    """Each rank's part of the bucket, from tensors laid out as its parameters; all other elements
    are stale.
    """
    axes = bucket.shard_axes
    if not axes:
        return list(tensors)
    layout = layout_of(program, bucket)
    whole = pack_bucket(program, bucket, tensors, without_padding=True)
    shape = (1,) * whole.lead + whole.array.shape[whole.lead : -1]
    # alike in all trials
    ones = Tensor(whole.dims, np.ones((*shape, layout.size), whole.array.dtype))
    mask = pad_shard(program, world, bucket, _part(world, bucket, axes, ones, n), n)
    here = Tensor(mask.dims, mask.array[..., : layout.end])
    return parts(program, world, bucket, stale(whole, here), without_padding=True)


def count_mask(
    program: Program, world: SimulatedMesh, bucket: Bucket, once: Sequence[int], n: Numbers
) -> Tensor:
    """One where a rank of a pipeline owns a part of the bucket's gradient, else zero; `once` if
    only on some ranks.
    """
    masks = [ownership_mask(program, world, name) for name in bucket.params]
    mask = _part(world, bucket, bucket.shard_axes, pack_bucket(program, bucket, masks), n)
    if not once:
        return n.constant(mask.array, mask.dims)
    pipeline = program.pipeline
    assert pipeline, "verify: no pipeline"
    here = world.among(pipeline.axis, once, mask.dims)
    return n.constant(np.where(here, mask.array, 0), mask.dims)


def stale(whole: Tensor, owned_part: Tensor) -> Tensor:
    """A flat buffer where `own` is not 0; elsewhere each element is its neighbour's, and
    whoever uses it is wrong.
    """
    array = np.empty(
        np.broadcast_shapes(whole.array.shape, owned_part.array.shape), whole.array.dtype
    )
    array[..., 1:], array[..., :1] = whole.array[..., :-1], whole.array[..., -1:]
    np.copyto(array, whole.array, where=owned_part.array > 0)
    return Tensor(whole.dims, array, whole.degree)


def together(
    program: Program, world: SimulatedMesh, bucket: Bucket, tensors: Sequence[Tensor], n: Numbers
) -> list[Tensor]:
    """Tensors that lie as the bucket's parameters do, put together of what each rank owns."""
    axes = bucket.shard_axes
    if not axes:
        return list(tensors)
    part = _part(world, bucket, axes, pack_bucket(program, bucket, tensors), n)
    return parts(
        program, world, bucket, world.coerce(part, axes, sharded(bucket.dim), INVARIANT, n)
    )


def _part(
    world: SimulatedMesh, bucket: Bucket, axes: Sequence[str], flat: Tensor, n: Numbers
) -> Tensor:
    return world.coerce(flat, axes, INVARIANT, sharded(bucket.dim), n)
