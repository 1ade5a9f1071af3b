"""Inputs of a step: parameters, tokens, labels, documents and draws, the same for every program of
a model.

Global values drawn from a seed, and their parts on the ranks.
"""

import numpy as np
from attrs import frozen

from ..analysis.vocabulary import vocabulary
from ..ir import DATA_DIMS, MICROBATCHES, Program, base
from .prime_field import Word, random_words
from .sharded_state import to_shards, with_noise
from .simulated_mesh import SimulatedMesh
from .tensors import RANDOM, Array, Numbers, Tensor

INPUT_DIMS = (MICROBATCHES, *DATA_DIMS)


@frozen
class Inputs:
    """Global parameters and inputs by name: [trials or 1, *dims]."""

    params: dict[str, Tensor]
    inputs: dict[str, Tensor]

    def on(self, program: Program, world: SimulatedMesh, numbers: Numbers) -> dict[str, Tensor]:
        """The parts of parameters and inputs on each rank."""
        env = dict[str, Tensor]()
        for param in program.params_and_buffers:
            value = everywhere(self.params[param.name], world)
            env[param.name] = world.spread(value, param.type)
        for arg in program.region.args:
            value = everywhere(self.inputs[base(arg.value.name)], world)
            env[arg.value.name] = world.spread(value, arg.value.type)
        if program.pipeline:
            for param in program.params:
                env[param.name] = with_noise(program, world, param.name, env[param.name], numbers)
        for bucket in program.buckets:
            whole = [env[name] for name in bucket.params]
            shards = to_shards(program, world, bucket, whole, numbers)
            env |= dict(zip(bucket.params, shards, strict=True))
        return env


def everywhere(value: Tensor, world: SimulatedMesh) -> Tensor:
    """A global value with an axis of size 1 for each axis of the mesh."""
    trials, *shape = value.array.shape
    return Tensor(
        value.dims, value.array.reshape(trials, *(1,) * len(world.axes), *shape), value.degree
    )


def scene(program: Program, numbers: Numbers) -> Inputs:
    """Parameters, tokens, labels, documents and draws of the program's sizes."""
    sizes = {dim.name: dim.size for dim in program.dims}
    params: dict[str, Tensor] = {}
    for param in program.params_and_buffers:
        dims = tuple(sorted(param.type.dims))  # their order is the compiler's choice
        shape = tuple(sizes[dim] for dim in dims)
        params[param.name] = Tensor(dims, numbers.random(shape, param.name), RANDOM)
    shape, ids = (1, *(sizes[dim] for dim in INPUT_DIMS)), program.valid(vocabulary(program))
    arrays = {
        "tokens": _tokens(numbers.seed, shape, ids),
        "labels": _labels(numbers.seed, shape, ids),
        "documents": _documents(shape),
        "draws": np.arange(shape[1] * shape[2]).reshape(shape[:3]),
    }
    inputs = dict[str, Tensor]()
    for name, array in arrays.items():
        inputs[name] = Tensor(INPUT_DIMS[: array.ndim - 1], array)
    return Inputs(params, inputs)


def _tokens(seed: int, shape: tuple[int, ...], vocabulary: int) -> Array:
    """Each differs from the one before it: among equal ones, where attention looks makes no
    difference.
    """
    steps = 1 + below(max(vocabulary - 1, 1), (seed, "tokens"), shape)
    return np.cumsum(steps, axis=-1) % vocabulary


def _labels(seed: int, shape: tuple[int, ...], vocabulary: int) -> Array:
    """No labels in the first of several sequences, nor in the first half of any: ranks differ in
    counts, some have 0.

    The first microbatch has more than the others, so that a mean of means is not the mean; a count
    is never 1 in all.  Each differs from its counterpart of the microbatch before, so that one
    microbatch's loss is not another's.
    """
    _, microbatches, batch, seq = shape
    microbatch, sequence, position = np.ogrid[:microbatches, :batch, :seq]
    skipped = np.minimum(np.where(microbatch == 0, 1, 2), batch - 1)
    labelled = (
        (sequence >= skipped) & (position >= seq // 2) & ((microbatch == 0) | (position == seq - 1))
    )
    ids = (below(vocabulary, (seed, "labels"), (1, 1, batch, seq)) + microbatch) % vocabulary
    return np.where(labelled, ids, -1)


def below(bound: int, key: tuple[object, ...], shape: tuple[int, ...]) -> Array:
    """Numbers from 0 to below `bound` that depend on the key only."""
    return (random_words(key, shape) % Word(bound)).astype(int)


def _documents(shape: tuple[int, ...]) -> Array:
    """The second document of a sequence begins where no neighbour's does; one sequence in `seq`
    has none.

    Only tokens after its beginning have labels: so the loss depends on what is seen before.
    """
    _, microbatches, batch, seq = shape
    microbatch, sequence, position = np.ogrid[:microbatches, :batch, :seq]
    begin = (microbatch + sequence) % seq
    return ((position >= begin) & (begin > 0)).astype(int)[None]
