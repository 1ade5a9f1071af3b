"""Steps that `scalec calibrate` runs to measure what the host of a GPU takes: programs of one rank
with few layers.

A rank's peers are absent, and its groups do nothing, so a step is all that the host does besides
calls of a group.  Non-goals: users' own ops; experts, for whose counts the host waits; inputs other
than tokens and labels.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from attrs import evolve

from ...compiler.analysis.hardware import find_shipped_gpu
from ...compiler.analysis.time.op_rows import op_rows
from ...compiler.emit.train_py import program_files
from ...compiler.ir import BATCH, MICROBATCHES, SEQUENCE, Program, walk, walk_regions
from ...compiler.syntax.source import Source

Json = dict[str, Any]

LAYERS = (1, 3)
"""The layers of each repeat in a step and in a longer one.  The two differ in layers only."""

ROWS = 32
"""The positions of a rank's sequence, so that the GPU is faster than the host."""

INPUTS = {"tokens", "labels"}
"""The inputs of a step, at most."""


def host_steps(programs: Sequence[Program]) -> list[Json]:
    """Two steps of the first plan without a pipeline, with fewer and more layers; one of the
    first with a pipeline.
    """
    plain, staged = list[Program](), list[Program]()
    for program in programs:
        if _is_able(program):
            (staged if program.pipeline else plain).append(program)
    steps = list[Json]()
    for program in plain[:1]:
        steps += [_step(_with_layers(program, layers)) for layers in LAYERS]
    return steps + [_step(program) for program in staged[:1]]


def _is_able(program: Program) -> bool:
    kinds = {op.kind for op in walk(program.region.body)}
    return (
        "call" not in kinds
        and not program.routes
        and {arg.value.name for arg in program.microbatches.args} <= INPUTS
    )


def _with_layers(program: Program, layers: int) -> Program:
    sizes = dict[str, int]()
    for region in walk_regions(program.region.body):
        if region.kind == "repeat":
            sizes[region.dim] = min(layers, program.size(region.dim))
    return program.with_sizes({**sizes, MICROBATCHES: 1})


def _step(program: Program) -> Json:
    """A step of a row of few tokens: its files, mesh and inputs; the ops that the host issues,
    and its actions.
    """
    batch = _split(program, BATCH)
    seq = min(ROWS * _split(program, SEQUENCE), program.size(SEQUENCE))
    small = program.with_sizes({BATCH: batch, SEQUENCE: seq})
    gpu = find_shipped_gpu("h100_sxm")
    assert gpu, "calibrate: no GPU to count by"
    counting = evolve(gpu, op=1.0, collective=0.0)
    inputs = list[list[int]]()
    for arg in small.microbatches.args:
        inputs.append([small.size(MICROBATCHES), *small.local_shape(arg.value.type)])
    stage = 0 if small.pipeline else None
    return {
        "files": program_files(small, Source(f"{program.name}.scale", "")),
        "mesh": {axis.name: axis.size for axis in program.axes},
        "inputs": inputs,
        "ops": sum(row.issued for row in op_rows(small, counting, stage)),
        "actions": _actions(small),
    }


def _split(program: Program, dim: str) -> int:
    """The number of ranks among which a dim of the data is split."""
    return prod(program.axis(claim.axis).size for claim in program.claims if claim.dim == dim)


def _actions(program: Program) -> int:
    """The number of actions of the first rank that compute."""
    schedule = program.pipeline.schedule if program.pipeline else None
    if not schedule:
        return 0
    return sum(not action.work.is_message for action in schedule.rows[0])
