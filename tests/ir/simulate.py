"""Evaluates IR programs for all ranks of their mesh in one process.

Purpose: what a program computes, by an evaluator that shares no code with the compiler's passes; on the way it holds
every value against its type: local shape, and copies that agree.
Non-goals: rounding (every element type is the numbers' own), speed.
"""

from collections.abc import Mapping

import numpy as np
from attrs import frozen

from ir.meanings import MEANINGS
from ir.placing import Array, Held, Mesh
from scalec.compiler.ir import Enter, Leave, Op, Placement, Program, Region, Type, base

INPUT_DIMS = ("microbatches", "batch", "seq")
"""The order in which inputs are given, as far as they have these dims."""

Env = dict[str, Held]


@frozen
class Outcome:
    """What a step yields, as global values."""

    loss: Array
    norm: Array
    count: Array
    params: dict[str, Array]


def run_step(program: Program, params: Mapping[str, Array], inputs: Mapping[str, Array]) -> Outcome:
    """The outcome of one step of gradient descent."""
    loss, norm, count, *updated = evaluate(program, params, inputs)
    ends = [base(end.name) for end in program.region.yields[3:]]
    names = [param.name for param in program.params]
    assert sorted(ends) == sorted(names), "a step yields its parameters"
    return Outcome(loss, norm, count, dict(zip(ends, updated, strict=True)))


def evaluate(program: Program, params: Mapping[str, Array], inputs: Mapping[str, Array]) -> list[Array]:
    """The global values of what the program's region yields, from global parameters and inputs."""
    mesh = Mesh.of(program)
    env = {param.name: mesh.spread(params[param.name], param.type) for param in program.params}
    for arg in program.region.args:
        env[arg.value.name] = mesh.spread(_ordered(inputs[base(arg.value.name)], arg.value.type), arg.value.type)
    inner = _body(mesh, program.region, env)
    return [mesh.whole(inner[end.name]) for end in program.region.yields]


def _ordered(value: Array, type: Type) -> Array:
    given = [dim for dim in INPUT_DIMS if dim in type.dims]
    return value.transpose([given.index(dim) for dim in type.dims])


def _body(mesh: Mesh, region: Region, outer: Env) -> Env:
    """All names visible at the end of the region's body."""
    env = dict(outer)
    for stmt in region.body:
        if isinstance(stmt, Op):
            env |= _op(mesh, stmt, env)
        elif stmt.kind in ("forward", "backward"):
            env = _body(mesh, stmt, env)
        else:
            env |= _loop(mesh, stmt, env)
    return env


def _op(mesh: Mesh, op: Op, env: Env) -> Env:
    args = [env[name] for name in op.inputs]
    if op.kind == "coerce":
        parts = [_coerced(mesh, op, args[0]).parts]
    elif op.kind in ("leaf", "leaf_grad"):
        parts = [mesh.spread(mesh.whole(args[0]), op.outputs[0].type).parts]
    else:
        parts = MEANINGS[op.kind](mesh, op, args)
    made = {value.name: Held(value.type, part) for value, part in zip(op.outputs, parts, strict=True)}
    for held in made.values():
        mesh.check(held)
    return made


def _coerced(mesh: Mesh, op: Op, held: Held) -> Held:
    source, target = op.get("from"), op.get("to")
    assert isinstance(source, Placement)
    assert isinstance(target, Placement)
    return mesh.coerced(held, op.names("axes"), source, target)


def _loop(mesh: Mesh, region: Region, outer: Env) -> Env:
    """The results of a repeat or of the microbatches, which run once per index of the region's dim."""
    count = mesh.dims[region.dim]
    order = range(count)[::-1] if region.reverse else range(count)
    carried = {arg.value.name: outer[arg.source] for arg in region.args if arg.enter is Enter.CARRY}
    ends: list[list[Held]] = []
    for i in order:
        slices = {a.value.name: _slice(mesh, outer[a.source], i) for a in region.args if a.enter is Enter.EACH}
        inner = _body(mesh, region, outer | slices | carried)
        ends.append([inner[end.name] for end in region.yields])
        lasts = [held for end, held in zip(region.yields, ends[-1], strict=True) if end.leave is Leave.LAST]
        carried = dict(zip(carried, lasts, strict=True))
    if region.reverse:
        last, ends = ends[-1], ends[::-1]
    else:
        last = ends[-1]
    results = zip(region.results, region.yields, last, zip(*ends, strict=True), strict=True)
    made = {value.name: Held(value.type, _left(mesh, end.leave, last, all_)) for value, end, last, all_ in results}
    for held in made.values():
        mesh.check(held)
    return made


def _slice(mesh: Mesh, held: Held, index: int) -> Held:
    return Held(held.type.inside(held.type.dims[0]), np.take(held.parts, index, axis=len(mesh.axes)))


def _left(mesh: Mesh, leave: Leave, last: Held, all_: tuple[Held, ...]) -> Array:
    match leave:
        case Leave.LAST:
            return last.parts
        case Leave.STACK:
            return np.stack([held.parts for held in all_], axis=len(mesh.axes))
        case Leave.SUM:
            return np.add.reduce([held.parts for held in all_])
