"""Memory of a pipeline's rank over its row: what its stages keep of microbatches, and what crosses
the cuts.

Purpose: the row action by action; while one runs, what it does is in memory as `peak` has it of the
stage alone.  One value of each kind that is sent is under way, as the runtime has it; a value that
is received has its memory from where its message begins.  Non-goals: what an allocator loses.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ...config.gpus import CPU
from ...ir import ITEM_BYTES, Op, Pipeline, Program, Value, once, walk
from ...ir.stages import crossing, stages
from ...ops.saved_tensors import Device
from ...schedules.actions import Schedule, Work
from ...schedules.activation_memory import Beside, Keeps, beside, passes
from ..stage_buckets import chunks, needed
from ..stage_program import StageProgram, stage_programs
from .aliasing import Storages
from .liveness import is_put_off, put_off
from .peak import PeakSnapshot, Walk
from .saved_activations import Keeper, Kept

if TYPE_CHECKING:
    from ...schedules.cell_table import Numbers


@frozen
class Stage:
    """Memory of a microbatch in a stage.

    kept      what autograd keeps of it, each storage once
    entered   bytes of what enters it that autograd does not keep; it is there as long
    later     bytes that the weights' part of backward needs of the part before it
    largest   of the gradients that the weights' part makes together, which go as soon as they are
              added
    forward   the moment when most is there, but of other microbatches
    backward  likewise
    input     likewise, in backward without the weights' part; that of backward, if no rows split it
    """

    kept: tuple[Kept, ...]
    entered: int
    later: int
    largest: int
    forward: PeakSnapshot
    backward: PeakSnapshot
    input: PeakSnapshot

    @property
    def held(self) -> int:
        """Bytes from forward to backward."""
        return sum(it.total for it in self.kept) + self.entered

    def during(self, work: Work) -> PeakSnapshot:
        """The moment when most is there while an action of the stage runs, but of other
        microbatches.
        """
        match work:
            case Work.FORWARD:
                return self.forward
            case Work.BACKWARD:
                return self.backward
            case Work.INPUT:
                return self.input
            case _:
                return evolve(self.backward, kept=self.later, other=self.largest)


@once
def stages_of(program: Program) -> tuple[Stage, ...]:
    """All stages of a pipeline, each by itself; those that do the same are one."""
    assert program.pipeline, "memory: no pipeline"
    groups = [cut.groups for cut in stages(program, program.pipeline)]
    every, rows = max(program.train.recompute.number, 1), program.pipeline.schedule
    splits = rows is None or rows.splits
    found: dict[object, Stage] = {}
    kinds: list[object] = []
    for number, stage in enumerate(stage_programs(program)):
        layers = ((len(own), own.start % every) for own in stage.layers.values())
        kinds.append((groups[number], number == 0, number == len(groups) - 1, *layers))
        if kinds[-1] not in found:
            found[kinds[-1]] = _stage(stage, device_of(program), splits)
    return tuple(found[kind] for kind in kinds)


def _stage(stage: StageProgram, device: Device, splits: bool) -> Stage:
    storages = Storages(stage.program, stage)
    keeper = Keeper(storages, device)
    walked = Walk(storages, keeper, device).peaks
    entered = sum(
        storages.bytes(name) for name in storages.received if storages.root(name) not in keeper.all
    )
    kept = tuple(keeper.all.values())
    body = storages.program.backward.body
    made = Counter[tuple[str, ...]]()  # what is made of the same is made together
    for op in filter(is_put_off, walk(body)):
        made[op.inputs] += storages.bytes(op.outputs[0].name)
    largest = max(made.values(), default=0)
    later = sum(put_off(storages, body).values())
    apart = Walk(storages, keeper, device, splits=True).peaks if splits else walked
    back = walked["backward"]
    first = apart.get("backward", back)  # of an embedding alone, all of backward is put off
    return Stage(kept, entered, later, largest, walked["forward"], back, first)


def device_of(program: Program) -> Device:
    """A GPU, where the cluster names one, or else the CPU."""
    return "cuda" if program.cluster.gpu not in ("", CPU) else "cpu"


def keeps(program: Program, of: Sequence[Stage]) -> Keeps:
    """Memory of ranks for a microbatch in each stage, and for what stages hand to each other."""
    assert program.pipeline, "memory: no pipeline"
    cuts = tuple(
        sum(_size(program, value) for value in values)
        for values in crossing(program, program.pipeline)
    )
    return Keeps(
        tuple(stage.held for stage in of),
        tuple(stage.later for stage in of),
        max(cuts, default=0),
        cuts,
    )


def peaks(
    program: Program, schedule: Schedule, of: Sequence[Stage], keeps: Keeps
) -> Iterator[PeakSnapshot]:
    """When in each rank's row most is in memory beside what always is, the last sums of
    gradients included.
    """
    assert program.pipeline, "memory: no pipeline"
    for rank, it in enumerate(beside(schedule, keeps)):
        own = Chunks(program, program.pipeline, rank)
        moments = [
            _at(it, cell, of, own)
            for cell in it.cells.largest(it.kept + it.handed + own.held(it.cells.at))
        ]
        update = PeakSnapshot(
            None, "update", (), "", 0, 0, own.gradients(len(schedule.rows[rank])), 0
        )
        yield max([*moments, update], key=lambda moment: moment.bytes)


def over_row(program: Program, rank: int) -> list[tuple[PeakSnapshot, PeakSnapshot]]:
    """For each action of a rank's row that computes, what is there before it, and when it runs
    the most.
    """
    pipeline = program.pipeline
    assert pipeline, "memory: no pipeline"
    assert pipeline.schedule, "memory: no rows"
    of = stages_of(program)
    held = keeps(program, of)
    it = [*beside(pipeline.schedule, held)][rank]
    own = Chunks(program, pipeline, rank)
    return [(_before(it, cell, held, own), _at(it, cell, of, own)) for cell in range(len(it.kept))]


def _before(it: Beside, cell: int, held: Keeps, own: "Chunks") -> PeakSnapshot:
    action, at = it.cells.action(cell), it.cells.cell(cell).at
    kept = int(it.kept[cell]) + int(held.before(action))
    other = int(it.handed[cell]) + int(passes(action, len(held.input) - 1, held)[0])
    return PeakSnapshot(
        None, "between actions", (), "", kept, own.weights(at), own.gradients(at), other
    )


def _at(it: Beside, cell: int, of: Sequence[Stage], own: "Chunks") -> PeakSnapshot:
    action, at = it.cells.action(cell), it.cells.cell(cell).at
    alone = of[action.stage].during(action.work)
    return evolve(
        alone,
        kept=alone.kept + int(it.kept[cell]),
        other=alone.other + int(it.handed[cell]),
        weights=own.weights(at),
        gradients=own.gradients(at),
    )


class Chunks:
    """Memory of a rank's chunks for a while: weights that are freed, gradients that are sent as
    another type.

    Each bucket has at most one such gradient under way, and the last to the end of the row.
    """

    def __init__(self, program: Program, pipeline: Pipeline, rank: int) -> None:
        spans = pipeline.schedule.spans[rank] if pipeline.schedule else None
        self._freed = {bucket.name for bucket in program.buckets if bucket.reshard_after_forward}
        sent = {bucket.name: program.reduce_dtype(bucket) for bucket in program.buckets}
        self._sent_bytes = {
            b.name: ITEM_BYTES[sent[b.name]] * (sent[b.name] != b.type.dtype)
            for b in program.buckets
        }
        self._own = [
            (chunk, needed(spans, chunk.stages).stop if spans else 1)
            for chunk in chunks(program)[rank]
        ]
        unpacks = [op for op in program.region.body if isinstance(op, Op) and op.kind == "unpack"]
        self._used = {str(op.get("bucket")): op.outputs[0].type.dtype for op in unpacks}
        self._ends = sorted({end for _, end in self._own})
        self._between = [(self._weights(at), self._gradients(at)) for at in (-1, *self._ends)]

    @property
    def most(self) -> int:
        """Bytes of all weights and of each bucket's largest gradient: no rows hold more at once."""
        sizes: dict[str, int] = {}
        for chunk, _ in self._own:
            sizes[chunk.bucket] = max(chunk.size, sizes.get(chunk.bucket, 0))
        return self.weights(0) + self._sent(sizes)

    def weights(self, at: int) -> int:
        """Bytes that are there in a cell, all gathered at the step's start."""
        return self._between[bisect_right(self._ends, at)][0]

    def gradients(self, at: int) -> int:
        """Bytes of those that have ended before a cell."""
        return self._between[bisect_right(self._ends, at)][1]

    def held(self, at: "Numbers") -> "Numbers":
        """Bytes of both in several cells."""
        import numpy as np

        return np.array([*map(sum, self._between)])[np.searchsorted(self._ends, at, side="right")]

    def _weights(self, at: int) -> int:
        freed = [chunk for chunk, end in self._own if at < end and chunk.bucket in self._freed]
        return sum(chunk.size * ITEM_BYTES[self._used[chunk.bucket]] for chunk in freed)

    def _gradients(self, at: int) -> int:
        ended = (
            (chunk, end) for chunk, end in sorted(self._own, key=lambda it: it[1]) if end <= at
        )
        return self._sent({chunk.bucket: chunk.size for chunk, _ in ended})

    def _sent(self, sizes: Mapping[str, int]) -> int:
        return sum(size * self._sent_bytes[name] for name, size in sizes.items())


def _size(program: Program, value: Value) -> int:
    return program.elements(value.type) * ITEM_BYTES[value.type.dtype]
