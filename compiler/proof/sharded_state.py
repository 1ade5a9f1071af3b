"""Flat buckets of all ranks: parameters side by side, and the parts of them that ranks hold.

Purpose: `packed` and its inverse `parts`; of what ranks share out, what each holds (`own`) and all hold (`together`).
Where each turn of a repeat has a buffer of its own, all of this is done to one turn's, or to the stack of all of them.
Non-goals: where in a bucket a parameter lies (`layout`).
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from attrs import evolve

from ..analysis.bucket_layout import layout_of, shard_axes
from ..ir import INVARIANT, PARTIAL, Bucket, Program, Type, sharded
from .arithmetic import Numbers
from .ownership import held
from .simulated_mesh import SimulatedMesh
from .tensors import Tensor, degree_of


def packed(program: Program, bucket: Bucket, tensors: Sequence[Tensor]) -> Tensor:
    """The flat buffer of a turn's tensors, or the stack of all turns' of stacks; zero where no tensor lies."""
    count = len(bucket.turns)
    turns = bucket.turns if tensors[0].dims[:count] == bucket.turns else ()
    lead = np.broadcast_shapes(*(x.array.shape[: x.lead + len(turns)] for x in tensors))
    flat = np.zeros((*lead, layout_of(program, bucket).size), tensors[0].array.dtype)
    for x, start in zip(tensors, layout_of(program, bucket).starts, strict=True):
        own = x.array.reshape(*x.array.shape[: x.lead + len(turns)], -1)
        flat[..., start : start + own.shape[-1]] = own
    return Tensor((*turns, bucket.dim), flat, degree_of(tensors))


def parts(program: Program, world: SimulatedMesh, bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The parameters' parts of a turn's buffer, or of the stack of all.  Raises ValueError at other sizes."""
    layout, turns = layout_of(program, bucket), flat.dims[:-1]
    if flat.array.shape[-1] != layout.size:
        raise ValueError(f"{flat.array.shape[-1]} elements are not a whole bucket")
    of = {param.name: _within(param.type, bucket, turns) for param in program.params}
    found: list[Tensor] = []
    for name, start in zip(bucket.params, layout.starts, strict=True):
        shape = world.shape(of[name])
        part = flat.array[..., start : start + prod(shape[len(turns) :])]
        found.append(Tensor(of[name].dims, part.reshape(*part.shape[: flat.lead], *shape), flat.degree))
    return found


def _within(type: Type, bucket: Bucket, turns: Sequence[str]) -> Type:
    """A parameter's type in buffers that are stacked along `turns`."""
    return evolve(type, dims=type.dims[len(bucket.turns) - len(turns) :])


def padded(program: Program, world: SimulatedMesh, bucket: Bucket, flat: Tensor, n: Numbers) -> Tensor:
    """A rank's part of a bucket in its place among zeros; a bucket that is not shared out as it is."""
    axes = shard_axes(program, bucket)
    return world.coerced(flat, axes, sharded(bucket.dim), PARTIAL, n) if axes else flat


def own(program: Program, world: SimulatedMesh, bucket: Bucket, tensors: Sequence[Tensor], n: Numbers) -> list[Tensor]:
    """Of tensors that lie as the bucket's parameters do, what each rank holds of the bucket; the rest is stale."""
    axes = shard_axes(program, bucket)
    if not axes:
        return list(tensors)
    whole = packed(program, bucket, tensors)
    ones = _part(world, bucket, axes, Tensor(whole.dims, np.ones_like(whole.array)), n)
    return parts(program, world, bucket, stale(whole, padded(program, world, bucket, ones, n)))


def counted(program: Program, world: SimulatedMesh, bucket: Bucket, once: Sequence[int], n: Numbers) -> Tensor:
    """One where a rank of a pipeline holds a part of the bucket's gradient, else zero; `once` if only on some ranks."""
    masks = [held(program, world, name) for name in bucket.params]
    mask = _part(world, bucket, shard_axes(program, bucket), packed(program, bucket, masks), n)
    if not once:
        return n.constant(mask.array, mask.dims)
    pipeline = program.pipeline
    assert pipeline, "verify: no pipeline"
    return n.constant(np.where(world.among(pipeline.axis, once, mask.dims), mask.array, 0), mask.dims)


def stale(whole: Tensor, held: Tensor) -> Tensor:
    """A flat buffer where `held` is not 0; elsewhere each element is its neighbour's, and whoever uses it is wrong."""
    return Tensor(whole.dims, np.where(held.array > 0, whole.array, np.roll(whole.array, 1, axis=-1)), whole.degree)


def together(
    program: Program, world: SimulatedMesh, bucket: Bucket, tensors: Sequence[Tensor], n: Numbers
) -> list[Tensor]:
    """Tensors that lie as the bucket's parameters do, put together of what each rank holds."""
    axes = shard_axes(program, bucket)
    if not axes:
        return list(tensors)
    part = _part(world, bucket, axes, packed(program, bucket, tensors), n)
    return parts(program, world, bucket, world.coerced(part, axes, sharded(bucket.dim), INVARIANT, n))


def _part(world: SimulatedMesh, bucket: Bucket, axes: Sequence[str], flat: Tensor, n: Numbers) -> Tensor:
    return world.coerced(flat, axes, INVARIANT, sharded(bucket.dim), n)
