"""The parameters of each pipeline rank; those that a rank does not own are filled with noise.

Purpose: a rank has the layers and the parameters of its stages; reading any other makes the proof fail.
Non-goals: state sharded within a stage (`flat`).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..ir import Enter, Op, Param, Pipeline, Program, Region, Stmt, uses
from ..ir.stages import groups, stages
from .arithmetic import Numbers
from .simulated_mesh import SimulatedMesh
from .tensors import RANDOM, Array, Tensor


def noise(x: Tensor, name: str, n: Numbers) -> Array:
    """The noise in place of elements of `x` that a rank does not own."""
    shape = x.array.shape[x.lead :]
    drawn = n.random(shape, f"nothing of {name}")
    return drawn.reshape(len(drawn), *(1,) * (x.lead - 1), *shape)


def held(program: Program, world: SimulatedMesh, name: str) -> Tensor:
    """One where a rank owns an element of a parameter, else zero."""
    param = next(param for param in program.params if param.name == name)
    pipeline = program.pipeline
    assert pipeline, "verify: every rank holds everything"
    shape = world.shape(param.type)
    found = np.zeros((world.axes[pipeline.axis], *shape), int)
    for rank in range(len(found)):
        found[rank][_own(program, pipeline, param, rank)] = 1
    return Tensor(param.type.dims, found.reshape(1, *_along(world, pipeline), *shape))


def _own(program: Program, pipeline: Pipeline, param: Param, rank: int) -> Sequence[int] | slice:
    """Along its first dim, what a rank holds of a parameter."""
    whole = dict(pipeline.held)
    if param.name in whole:
        return slice(None) if rank in pipeline.ranks_of(param.name) else []
    cut = pipeline.dims.index(param.type.dims[0])
    here = zip(pipeline.homes, stages(program, pipeline), strict=True)
    return [turn for home, stage in here if home == rank for turn in stage.turns[cut]]


def _along(world: SimulatedMesh, pipeline: Pipeline) -> tuple[int, ...]:
    """The shape of a mesh in which ranks differ along the stages' axis alone."""
    return tuple(size if axis == pipeline.axis else 1 for axis, size in world.axes.items())


def known(program: Program, world: SimulatedMesh, name: str, x: Tensor, n: Numbers) -> Tensor:
    """What ranks hold of a parameter, and noise where they hold nothing."""
    mask = held(program, world, name)
    return Tensor(x.dims, np.where(mask.array > 0, x.array, noise(x, name, n)), RANDOM)


def settled(program: Program, world: SimulatedMesh, name: str, x: Tensor) -> Tensor:
    """What ranks hold of a parameter; where one holds nothing, what the first holds that does."""
    pipeline = program.pipeline
    assert pipeline, "verify: every rank holds everything"
    at = 1 + list(world.axes).index(pipeline.axis)
    mask, array = np.broadcast_arrays(held(program, world, name).array > 0, x.array)
    first = np.take_along_axis(array, mask.argmax(axis=at, keepdims=True), axis=at)
    return Tensor(x.dims, np.where(mask, array, first), x.degree)


def readers(program: Program, pipeline: Pipeline, forward: Sequence[Stmt]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The stages that read each parameter of which a repeat that is cut takes no slices."""
    params = origins(program)
    bodies, repeats = groups(pipeline, forward)
    found: dict[str, set[int]] = {}
    for k, stage in enumerate(stages(program, pipeline)):
        names = {name for group in stage.groups for name in _read(bodies[group])}
        names |= {name for i, turns in enumerate(stage.turns) if turns for name in _captured(repeats[i])}
        for name in names & params.keys():
            found.setdefault(params[name], set()).add(k)
    return tuple((param.name, tuple(sorted(found[param.name]))) for param in program.params if param.name in found)


def _read(body: Sequence[Stmt]) -> Iterator[str]:
    for stmt in body:
        yield from stmt.inputs if isinstance(stmt, Op) else uses(stmt)


def _captured(region: Region) -> set[str]:
    """What a repeat reads whole."""
    return {*uses(region)} - {arg.source for arg in region.args if arg.enter is Enter.EACH}


def origins(program: Program) -> dict[str, str]:
    """The parameter that each of the step's values is made of before its microbatches, by itself."""
    found = {param.name: param.name for param in program.params}
    for stmt in program.region.body:
        if isinstance(stmt, Region):
            break
        if stmt.kind == "unpack":
            made = program.bucket(str(stmt.get("bucket"))).params
            found |= {value.name: name for value, name in zip(stmt.outputs, made, strict=True)}
        elif stmt.inputs and stmt.inputs[0] in found:
            found |= {value.name: found[stmt.inputs[0]] for value in stmt.outputs}
    return found
