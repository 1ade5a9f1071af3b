"""Mistakes in when the chunks of a pipeline's stages are moved: too late before a stage, or too
early after it.

Non-goals: what moves them is an op of the step like any other (`coercions`, `buckets`).
"""

from collections.abc import Callable, Iterator

from attrs import evolve

from ....compiler.analysis.stage_program import StageBlock, stage_programs
from ....compiler.ir import Program, uses
from ....compiler.proof.pipeline.split_backward import halves
from ....compiler.proof.pipeline.stage import Move, moves, names
from ....compiler.schedules.actions import Action, Row, Work
from .edits import Mutant

AWAITED, BEGUN, FREED = (
    "weights used before they are there",
    "reduced before it is complete",
    "weights freed too early",
)
CHUNKS = (AWAITED, BEGUN, FREED)
"""The families."""


def chunk_mutants(program: Program) -> Iterator[Mutant]:
    """All mutants of what moves around the rows of a program of small sizes."""
    pipeline = program.pipeline
    if not pipeline or not pipeline.schedule:
        return
    line = str(pipeline.settings.spans.get("schedule", program.region.span))
    own = moves(program, pipeline.schedule.rows)
    stages = _Stages(program)
    for i, move in enumerate(own):
        row = pipeline.schedule.rows[move.rank]
        for family, wrong in _wrong(stages, row, move):
            what = (
                f"{family}: stages {', '.join(map(str, move.chunk.stages))} of {move.chunk.bucket}"
            )
            yield Mutant(family, what, line, program, moved=(*own[:i], wrong, *own[i + 1 :]))


def _wrong(stages: "_Stages", row: Row, move: Move) -> Iterator[tuple[str, Move]]:
    """A chunk that is awaited one cell late, and reduced or freed one action early: before the
    last that needs it.
    """
    if move.awaited is not None:
        yield AWAITED, evolve(move, awaited=move.awaited + 1)
    if move.begun is not None:
        yield BEGUN, evolve(move, begun=_last(row, move, stages.adds))
    if move.freed is not None:
        yield FREED, evolve(move, freed=_last(row, move, stages.reads))


def _last(row: Row, move: Move, params: Callable[[Action], set[str]]) -> int:
    """The last cell in which a stage of a chunk does something with its parameters."""
    cells = ((at, action) for at, action in enumerate(row) if action.stage in move.chunk.stages)
    return max(
        at
        for at, action in cells
        if not action.work.is_message and params(action) & {*move.chunk.params}
    )


class _Stages:
    """The blocks that each action of a stage runs."""

    def __init__(self, program: Program) -> None:
        self._names = names(program, program.microbatches)
        self._parts: list[dict[Work, StageBlock]] = []
        for stage in stage_programs(program):
            both = halves(stage.backward, program.types)
            parts = {Work.FORWARD: stage.forward, Work.BACKWARD: stage.backward}
            self._parts.append(parts | {Work.INPUT: both.input, Work.WEIGHT: both.weight})

    def reads(self, action: Action) -> set[str]:
        """The parameters that it reads."""
        body = self._parts[action.stage][action.work].body
        return {self._names.weights[name] for name in uses(*body) if name in self._names.weights}

    def adds(self, action: Action) -> set[str]:
        """The parameters to whose gradients it adds."""
        made = self._parts[action.stage][action.work].bound_names
        return {self._names.gradients[name] for name in made if name in self._names.gradients}
