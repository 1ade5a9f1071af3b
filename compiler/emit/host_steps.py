"""Steps by which `scalec calibrate` measures what the host of a GPU takes: programs of one rank
with few layers.

A rank's peers are absent, and its groups do nothing, so a step is all that the host does besides
calls of a group.  Non-goals: users' own ops; experts, for whose counts the host waits; inputs other
than tokens and labels.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from attrs import evolve

from ..analysis.hardware import named
from ..analysis.time.op_rows import op_rows
from ..ir import BATCH, MICROBATCHES, SEQUENCE, Program, walk, walk_regions
from ..syntax.source import Source
from .train_py import program_files

Json = dict[str, Any]

LAYERS = (1, 3)
"""The layers of each repeat in a step and in a longer one: from one to the other only layers
are added.
"""

ROWS = 32
"""The positions of a rank's sequence, so that the GPU is faster than the host."""

INPUTS = {"tokens", "labels"}
"""The inputs of a step, at most."""


def host_steps(programs: Sequence[Program]) -> list[Json]:
    """Two steps of the first plan without a pipeline, with fewer and more layers; one of the
    first with a pipeline.
    """
    able = [program for program in programs if _is_able(program)]
    plain = [program for program in able if not program.pipeline][:1]
    steps = [_with_layers(program, layers) for program in plain for layers in LAYERS]
    return [_step(program) for program in (*steps, *[it for it in able if it.pipeline][:1])]


def _is_able(program: Program) -> bool:
    kinds = {op.kind for op in walk(program.region.body)}
    return (
        "call" not in kinds
        and not program.routes
        and {arg.value.name for arg in program.microbatches.args} <= INPUTS
    )


def _with_layers(program: Program, layers: int) -> Program:
    repeats = {it.dim for it in walk_regions(program.region.body) if it.kind == "repeat"}
    return program.sized(
        {**{dim: min(layers, program.size(dim)) for dim in repeats}, MICROBATCHES: 1}
    )


def _step(program: Program) -> Json:
    """A step of a row of few tokens: its files, mesh and inputs; the ops that the host issues,
    and its actions.
    """
    ranks = {
        dim: prod(program.axis(it.axis).size for it in program.claims if it.dim == dim)
        for dim in (BATCH, SEQUENCE)
    }
    small = program.sized(
        {BATCH: ranks[BATCH], SEQUENCE: min(ROWS * ranks[SEQUENCE], program.size(SEQUENCE))}
    )
    on = named("h100_sxm")
    assert on, "calibrate: no GPU to count by"
    counting = evolve(on, op=1.0, collective=0.0)
    return {
        "files": program_files(small, Source(f"{program.name}.scale", "")),
        "mesh": {axis.name: axis.size for axis in program.axes},
        "inputs": [
            [small.size(MICROBATCHES), *small.local_shape(arg.value.type)]
            for arg in small.microbatches.args
        ],
        "ops": sum(row.issued for row in op_rows(small, counting, 0 if small.pipeline else None)),
        "actions": _actions(small),
    }


def _actions(program: Program) -> int:
    """The actions of the first rank that compute."""
    schedule = program.pipeline.schedule if program.pipeline else None
    return sum(not it.work.is_message for it in schedule.rows[0]) if schedule else 0
