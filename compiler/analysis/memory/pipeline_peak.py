"""Memory of a pipeline's rank over its row: what its stages keep of microbatches, and what crosses
the cuts.

Purpose: the row action by action.  While an action runs, it takes what `peak` finds for the stage
alone.  One value of each kind that is sent is under way, as the runtime has it; a value that is
received has its memory from where its message begins.  Non-goals: what an allocator loses.
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
from ...schedules.activation_memory import Beside, Keeps, get_traffic, memory_beside
from ..stage_buckets import Chunk, chunks, needed
from ..stage_program import StageProgram, stage_programs
from .aliasing import Storages
from .liveness import get_put_off_sizes, is_put_off
from .peak import PeakSnapshot, Walk
from .saved_activations import Keeper, Kept

if TYPE_CHECKING:
    from ...schedules.cell_table import Numbers


@frozen
class Stage:
    """Memory of a microbatch in a stage.

    kept      what autograd keeps of it, each storage once
    entered   bytes of what enters the stage and autograd does not keep; it is there as long
    later     bytes that the weights' part of backward needs of the part before it
    largest   bytes of the largest gradients that the weights' part makes together; they go as soon
              as they are added
    forward   the moment when most is there, other microbatches left out
    backward  likewise
    input     likewise, in backward without the weights' part; the same as `backward`, if no rows
              split it
    """

    kept: tuple[Kept, ...]
    entered: int
    later: int
    largest: int
    forward: PeakSnapshot
    backward: PeakSnapshot
    input: PeakSnapshot

    @property
    def microbatch_bytes(self) -> int:
        """Bytes from forward to backward."""
        return sum(tensor.total for tensor in self.kept) + self.entered

    def during(self, work: Work) -> PeakSnapshot:
        """The moment when most is there while an action of the stage runs, other microbatches
        left out.
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
    """All stages of a pipeline, each by itself; stages that do the same are one."""
    assert program.pipeline, "memory: no pipeline"
    groups = [cut.groups for cut in stages(program, program.pipeline)]
    every, rows = max(program.train.recompute.number, 1), program.pipeline.schedule
    splits = rows is None or rows.splits
    stage_by_kind: dict[object, Stage] = {}
    all_stages = list[Stage]()
    for number, stage in enumerate(stage_programs(program)):
        layers = tuple((len(numbers), numbers.start % every) for numbers in stage.layers.values())
        kind = (groups[number], number == 0, number == len(groups) - 1, layers)
        if kind not in stage_by_kind:
            stage_by_kind[kind] = _stage(stage, device_of(program), splits)
        all_stages.append(stage_by_kind[kind])
    return tuple(all_stages)


def _stage(stage: StageProgram, device: Device, splits: bool) -> Stage:
    storages = Storages(stage.program, stage)
    keeper = Keeper(storages, device)
    walked = Walk(storages, keeper, device).peaks
    entered = 0
    for name in storages.received:
        if storages.root(name) not in keeper.all:
            entered += storages.bytes(name)
    body = storages.program.backward.body
    sizes = Counter[tuple[str, ...]]()  # gradients of the same operands are made together
    for op in filter(is_put_off, walk(body)):
        sizes[op.inputs] += storages.bytes(op.outputs[0].name)
    without_weights = walked
    if splits:
        without_weights = Walk(storages, keeper, device, splits=True).peaks
    return Stage(
        tuple(keeper.all.values()),
        entered,
        later=sum(get_put_off_sizes(storages, body).values()),
        largest=max(sizes.values(), default=0),
        forward=walked["forward"],
        backward=walked["backward"],
        # of an embedding alone, all of backward is put off
        input=without_weights.get("backward", walked["backward"]),
    )


def device_of(program: Program) -> Device:
    """A GPU, where the cluster names one, or else the CPU."""
    return "cuda" if program.cluster.gpu not in ("", CPU) else "cpu"


def keeps(program: Program, all_stages: Sequence[Stage]) -> Keeps:
    """Memory of ranks for a microbatch in each stage, and for what stages hand to each other."""
    assert program.pipeline, "memory: no pipeline"
    cuts = list[int]()
    for values in crossing(program, program.pipeline):
        cuts.append(sum(_size(program, value) for value in values))
    return Keeps(
        tuple(stage.microbatch_bytes for stage in all_stages),
        tuple(stage.later for stage in all_stages),
        max(cuts, default=0),
        tuple(cuts),
    )


def peaks(
    program: Program, schedule: Schedule, all_stages: Sequence[Stage], keeps: Keeps
) -> Iterator[PeakSnapshot]:
    """When in each rank's row most is in memory beside what always is, the last sums of
    gradients included.
    """
    assert program.pipeline, "memory: no pipeline"
    for rank, row in enumerate(memory_beside(schedule, keeps)):
        rank_chunks = Chunks(program, program.pipeline, rank)
        sizes = row.kept + row.handed + rank_chunks.get_bytes_in_cells(row.cells.place)
        moments = [
            _peak_of_action(row, cell, all_stages, rank_chunks) for cell in row.cells.largest(sizes)
        ]
        last_gradients = rank_chunks.gradients(len(schedule.rows[rank]))
        update = PeakSnapshot(None, "update", (), "", 0, 0, last_gradients, 0)
        yield max([*moments, update], key=lambda moment: moment.bytes)


def over_row(program: Program, rank: int) -> list[tuple[PeakSnapshot, PeakSnapshot]]:
    """For each action of a rank's row that computes, what is there before it, and the moment when
    most is there while it runs.
    """
    pipeline = program.pipeline
    assert pipeline, "memory: no pipeline"
    assert pipeline.schedule, "memory: no rows"
    all_stages = stages_of(program)
    sizes = keeps(program, all_stages)
    row = [*memory_beside(pipeline.schedule, sizes)][rank]
    rank_chunks = Chunks(program, pipeline, rank)
    moments = list[tuple[PeakSnapshot, PeakSnapshot]]()
    for cell in range(len(row.kept)):
        before = _moment_before(row, cell, sizes, rank_chunks)
        moments.append((before, _peak_of_action(row, cell, all_stages, rank_chunks)))
    return moments


def _moment_before(row: Beside, cell: int, sizes: Keeps, rank_chunks: "Chunks") -> PeakSnapshot:
    action, place = row.cells.action(cell), row.cells.cell(cell).place
    kept = int(row.kept[cell]) + int(sizes.before(action))
    other = int(row.handed[cell]) + int(get_traffic(action, len(sizes.input) - 1, sizes)[0])
    return PeakSnapshot(
        None,
        "between actions",
        (),
        "",
        kept,
        rank_chunks.weights(place),
        rank_chunks.gradients(place),
        other,
    )


def _peak_of_action(
    row: Beside, cell: int, all_stages: Sequence[Stage], rank_chunks: "Chunks"
) -> PeakSnapshot:
    action, place = row.cells.action(cell), row.cells.cell(cell).place
    alone = all_stages[action.stage].during(action.work)
    return evolve(
        alone,
        kept=alone.kept + int(row.kept[cell]),
        other=alone.other + int(row.handed[cell]),
        weights=rank_chunks.weights(place),
        gradients=rank_chunks.gradients(place),
    )


class Chunks:
    """Memory of a rank's chunks for a while: weights that are freed, gradients that are sent as
    another type.

    Each bucket has at most one such gradient under way, and the last to the end of the row.
    """

    def __init__(self, program: Program, pipeline: Pipeline, rank: int) -> None:
        spans = pipeline.schedule.spans[rank] if pipeline.schedule else None
        self._freed = {bucket.name for bucket in program.buckets if bucket.reshard_after_forward}
        self._sent_bytes: dict[str, int] = {}  # of an element; 0 for gradients sent as they are
        for bucket in program.buckets:
            dtype = program.reduce_dtype(bucket)
            self._sent_bytes[bucket.name] = 0 if dtype == bucket.type.dtype else ITEM_BYTES[dtype]
        self._own = list[tuple[Chunk, int]]()  # each chunk with the place where it ends
        for chunk in chunks(program)[rank]:
            end = needed(spans, chunk.stages).stop if spans else 1
            self._own.append((chunk, end))
        self._used: dict[str, str] = {}
        for op in program.region.body:
            if isinstance(op, Op) and op.kind == "unpack":
                self._used[str(op.get("bucket"))] = op.outputs[0].type.dtype
        self._ends = sorted({end for _, end in self._own})
        self._between = [
            (self._weights(place), self._gradients(place)) for place in (-1, *self._ends)
        ]

    @property
    def most(self) -> int:
        """Bytes of all weights and of each bucket's largest gradient: no rows hold more at once."""
        sizes: dict[str, int] = {}
        for chunk, _ in self._own:
            sizes[chunk.bucket] = max(chunk.size, sizes.get(chunk.bucket, 0))
        return self.weights(0) + self._get_sent_bytes(sizes)

    def weights(self, place: int) -> int:
        """Bytes of weights that are there in a cell, all gathered at the step's start."""
        return self._between[bisect_right(self._ends, place)][0]

    def gradients(self, place: int) -> int:
        """Bytes of the gradients of chunks that have ended before a cell."""
        return self._between[bisect_right(self._ends, place)][1]

    def get_bytes_in_cells(self, places: "Numbers") -> "Numbers":
        """Bytes of weights and gradients together in several cells."""
        import numpy as np

        sizes = np.array([*map(sum, self._between)])
        return sizes[np.searchsorted(self._ends, places, side="right")]

    def _weights(self, place: int) -> int:
        size = 0
        for chunk, end in self._own:
            if place < end and chunk.bucket in self._freed:
                size += chunk.size * ITEM_BYTES[self._used[chunk.bucket]]
        return size

    def _gradients(self, place: int) -> int:
        sizes: dict[str, int] = {}  # a later chunk's gradient replaces an earlier one's
        for chunk, end in sorted(self._own, key=lambda pair: pair[1]):
            if end <= place:
                sizes[chunk.bucket] = chunk.size
        return self._get_sent_bytes(sizes)

    def _get_sent_bytes(self, sizes: Mapping[str, int]) -> int:
        return sum(size * self._sent_bytes[name] for name, size in sizes.items())


def _size(program: Program, value: Value) -> int:
    return program.elements(value.type) * ITEM_BYTES[value.type.dtype]
