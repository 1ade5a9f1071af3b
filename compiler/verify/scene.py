"""What a step begins with: parameters, tokens and labels, the same for every program of a model.

Purpose: global values drawn from a seed, and their parts on the ranks.
Non-goals: what is done with them.
"""

from hashlib import blake2b

import numpy as np
from attrs import frozen

from ..ir import MICROBATCHES, Program, base, types, walk
from .numbers import Numbers
from .tensors import Tensor
from .world import World

INPUT_DIMS = (MICROBATCHES, "batch", "seq")

UNLABELLED = 0.3
"""The share of tokens without a label; besides, the first sequence of every microbatch has none."""


@frozen
class Scene:
    """Global parameters and inputs by name: [trials or 1, *dims]."""

    params: dict[str, Tensor]
    inputs: dict[str, Tensor]

    def on(self, program: Program, world: World) -> dict[str, Tensor]:
        """What each rank holds of parameters and inputs."""
        held = {p.name: (self.params[p.name], p.type) for p in program.params}
        held |= {arg.value.name: (self.inputs[base(arg.value.name)], arg.value.type) for arg in program.region.args}
        return {name: world.spread(everywhere(value, world), type) for name, (value, type) in held.items()}


def everywhere(value: Tensor, world: World) -> Tensor:
    """A global value with an axis of size 1 for each axis of the mesh."""
    trials, *shape = value.array.shape
    return Tensor(value.dims, value.array.reshape(trials, *(1,) * len(world.axes), *shape), value.degree)


def scene(program: Program, numbers: Numbers) -> Scene:
    """Parameters, tokens and labels of the program's sizes."""
    sizes = {dim.name: dim.size for dim in program.dims}
    params: dict[str, Tensor] = {}
    for param in program.params:
        dims = tuple(sorted(param.type.dims))  # their order is the compiler's choice
        params[param.name] = Tensor(dims, numbers.random(tuple(sizes[dim] for dim in dims), param.name), 1)
    rng = np.random.default_rng(list(blake2b(f"{numbers.seed} tokens".encode(), digest_size=16).digest()))
    shape = (1, *(sizes[dim] for dim in INPUT_DIMS))
    tokens, labels = rng.integers(0, _vocabulary(program), (2, *shape))
    labels[rng.random(shape) < UNLABELLED] = -1
    if sizes["batch"] > 1:
        labels[:, :, 0] = -1  # so that ranks have counts of their own, and one has none
    return Scene(params, {"tokens": Tensor(INPUT_DIMS, tokens), "labels": Tensor(INPUT_DIMS, labels)})


def _vocabulary(program: Program) -> int:
    """How many ids every table has a row for, and every loss a class."""
    found = types(program)
    tables = [found[op.inputs[1]].dims[0] for op in walk(program.region.body) if op.kind == "embedding"]
    classes = [
        found[op.inputs[0]].dims[-1]
        for op in walk(program.region.body)
        if op.kind in ("cross_entropy", "softmax_parts")
    ]
    return min(program.size(dim) for dim in tables + classes)
