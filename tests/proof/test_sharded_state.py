"""Sharded flat buffers of layers: each rank holds a part, the rest is stale, together they are
whole.

Non-goals: what is packed where in one buffer (`test_meanings`), layouts
(`tests/ops/test_padding.py`).
"""

import numpy as np
import pytest

from helpers.plan_table import PLANS
from scalec.compiler.ir import Bucket
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import Case, case_of
from scalec.compiler.proof.sharded_state import layout_of, together
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.proof.tensors import Array, Tensor

NAMES = (
    "shared optimizer state",
    "layers gathered ahead",
    "shared parameters, several buckets",
    "shared parameters, copied outside",
    "shared parameters, nested repeats",
)


def cases(name: str) -> list[Case]:
    program, model = PLANS[name].program(), PLANS[name].program("resolve")
    return [case_of(program, model, axes) for axes in meshes(program)]


def get_parts(case: Case, bucket: Bucket) -> tuple[list[Tensor], list[Array]]:
    """What ranks hold of a bucket's parameters at first, and whether each element is the
    parameter's own.
    """
    numbers, world = Field(2, len(case.mesh)), SimulatedMesh.of_program(case.program)
    start = case.scene(numbers)
    types = {param.name: param.type for param in case.program.params}
    found = start.on(case.program, world, numbers)
    whole = [
        world.spread(everywhere(start.params[name], world), types[name]) for name in bucket.params
    ]
    right = [
        (found[name].array == of.array).all(axis=0)
        for name, of in zip(bucket.params, whole, strict=True)
    ]
    return [found[name] for name in bucket.params], right


def everywhere(value: Tensor, world: SimulatedMesh) -> Tensor:
    trials, *shape = value.array.shape
    return Tensor(value.dims, value.array.reshape(trials, *(1,) * len(world.axes), *shape))


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_holds_its_part_of_every_turn(name: str) -> None:
    """Ranks of the bucket's axes hold all of a layer, each element once; ranks of other axes
    hold the same.
    """
    for case in cases(name):
        shared = [bucket for bucket in case.program.buckets if bucket.shard_axes]
        assert shared
        for bucket in shared:
            axes = bucket.shard_axes
            at = tuple(list(case.mesh).index(axis) for axis in axes)
            _, right = get_parts(case, bucket)
            for own in right:
                assert (own.sum(axis=at) == 1).all()
            layers = [
                own.reshape(*own.shape[: len(case.mesh) + len(bucket.layers)], -1) for own in right
            ]
            parts = np.concatenate(layers, axis=-1).sum(axis=-1)
            most = parts.max(axis=at)
            assert (most < np.concatenate(layers, axis=-1).shape[-1]).all(), (
                "a rank holds all of a layer"
            )


def test_shares_at_small_sizes_have_no_more_padding_than_ranks() -> None:
    """Shares of whole rows, whose lengths have few common divisors there, would leave most
    ranks padding alone.
    """
    for case in (case for name in NAMES for case in cases(name)):
        for bucket in case.program.buckets:
            layout = layout_of(case.program, bucket)
            assert layout.size - layout.end < case.program.degree(bucket.shard_axes)


@pytest.mark.parametrize("name", NAMES)
def test_what_ranks_hold_is_the_whole_together(name: str) -> None:
    for case in cases(name):
        numbers, world = Field(2, len(case.mesh)), SimulatedMesh.of_program(case.program)
        start = case.scene(numbers)
        types = {param.name: param.type for param in case.program.params}
        for bucket in case.program.buckets:
            tensors, _ = get_parts(case, bucket)
            for param, all_ in zip(
                bucket.params, together(case.program, world, bucket, tensors, numbers), strict=True
            ):
                whole = world.spread(everywhere(start.params[param], world), types[param])
                assert (all_.array == whole.array).all()
