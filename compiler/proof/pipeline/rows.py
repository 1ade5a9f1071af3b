"""Does the rows of a pipeline's schedule: each rank its actions in order, on the values that it
holds and the values that it is sent.

Evaluates a step's microbatches as its ranks run them.  Values that cross stages lie in slots of a
rank; an action takes its inputs out of them.  A receive waits for nothing, but the action that
takes its value does; of two ranks' messages the first that is sent is the first that is received.
So a value that is missing when it is read is an error, and a value that is wrong shows in the
results.  Weights exist from where their gather is awaited to where they are freed; whatever is
added to a gradient during its reduction is lost (`Moved`).
"""

from collections import defaultdict, deque
from typing import TypeAlias

from ...analysis.stage_program import stage_programs
from ...ir import Region, walk
from ...ops import messages
from ...schedules.actions import Action, Schedule, Work
from ...schedules.dependencies import Cell
from ..interpreter import Env, Interpreter, differing
from ..simulated_mesh import SimulatedMesh
from .stage import Move, Moved, StageRunner, Sums, moves, names, result

Slot: TypeAlias = tuple[str, int, int]
"""The content of a slot: value, stage and microbatch."""

ENTERING, RETURNING, KEPT, LEFT = (
    "what enters",
    "the gradient of what leaves",
    "what `F` keeps",
    "what `I` leaves",
)

RECEIVED = {Work.RECEIVE_FORWARD: ENTERING, Work.RECEIVE_BACKWARD: RETURNING}


class RowsError(Exception):
    """Rows that cannot be done; says why, and names the rank and the cell."""


class LossError(RowsError):
    """Rows of evaluation that make another loss than the step."""


def run_rows(
    machine: Interpreter,
    region: Region,
    outer: Env,
    freed: Cell | None = None,
    moved: tuple[Move, ...] | None = None,
    evaluation: Schedule | None = None,
) -> Env:
    """The results of the microbatches `region`.  Raises RowsError.

    Evaluation is done too, as `evaluation` has it, or the forwards of the rows; its loss must be
    the loss of the step.  The entries that the cell `freed` would take are gone before.  Chunks are
    moved as their rows say, or as `moved`.
    """
    pipeline = machine.program.pipeline
    assert pipeline, "verify: no pipeline"
    assert pipeline.schedule, "verify: no rows"
    _demand_stages_apart(machine, region, pipeline.axis)
    worlds: dict[tuple[tuple[str, int], ...], SimulatedMesh] = {}
    stages = list[StageRunner]()
    programs = stage_programs(machine.program)
    for program, rank in zip(programs, pipeline.stage_to_rank, strict=True):
        stages.append(StageRunner(machine, region, outer, program, rank, worlds))
    called = names(machine.program, region)
    if moved is None:
        moved = moves(machine.program, pipeline.schedule.rows)
    rows = _Rows(machine, pipeline.schedule, stages, Moved(moved, called), freed)
    rows.run()
    ends = zip(region.yields, region.results, strict=True)
    results = {value.name: result(stages, rows.sums, end, value.type) for end, value in ends}
    forwards = evaluation or pipeline.schedule.forwards
    chunks = Moved(moves(machine.program, forwards.rows), called)
    _evaluate(_Rows(machine, forwards, stages, chunks, keeps=False), region, results)
    return results


def _demand_stages_apart(machine: Interpreter, region: Region, axis: str) -> None:
    """Raises RowsError where an op communicates over the stages' axis."""
    for op in walk(region.body):
        axes = {*op.names("axes")}
        for message in messages(machine.program, op, machine.program.types):
            axes.update(message.axes)
        if axis in axes:
            raise RowsError(
                f"`{op.outputs[0].name}` is computed by all stages at once, which work on"
                " different microbatches"
            )


def _evaluate(forwards: "_Rows", region: Region, results: Env) -> None:
    """Does the rows of evaluation.

    Raises RowsError where what they make is not in the results of the step.
    """
    try:
        forwards.run()
    except RowsError as error:
        raise RowsError(f"in evaluation, {error}") from None
    stages, numbers = forwards.stages, forwards.machine.numbers
    for end, value in zip(stages[-1].lasts, region.results, strict=False):
        loss = result(stages, forwards.sums, end, value.type)
        if differing(numbers, loss, results[value.name]):
            raise LossError("in evaluation, the loss is not that of the step")


class _Rows:
    def __init__(
        self,
        machine: Interpreter,
        schedule: Schedule,
        stages: list[StageRunner],
        moved: Moved,
        freed: Cell | None = None,
        keeps: bool = True,
    ) -> None:
        self._kept = {Work.FORWARD: KEPT, Work.INPUT: LEFT} if keeps else {}
        self.machine, self._schedule, self.stages, self._freed = machine, schedule, stages, freed
        self._moved = moved
        self._slots: list[dict[Slot, Env]] = [{} for _ in schedule.rows]
        self._sent = defaultdict[tuple[int, int], deque[Env]](deque)
        self._awaited = defaultdict[tuple[int, int], deque[Slot]](deque)
        self._cell = Cell(0, 0)
        self.sums: Sums = {}

    def run(self) -> None:
        """Does all rows."""
        positions = [0] * self._schedule.ranks
        while any(self._advances(rank, positions) for rank in range(len(positions))):
            pass
        for rank, row in enumerate(self._schedule.rows):
            if positions[rank] < len(row):
                self._cell = Cell(rank, positions[rank])
                raise self._error("nothing is sent that it could take")
        for (source, target), values in self._sent.items():
            if values:
                raise RowsError(f"rank {source} sends rank {target} what that does not receive")
        for (source, target), slots in self._awaited.items():
            if slots:
                raise RowsError(
                    f"rank {target} receives from rank {source} what that does not send"
                )

    def _advances(self, rank: int, positions: list[int]) -> bool:
        """Does what can be done of a row, and says whether that is anything."""
        row, begin = self._schedule.rows[rank], positions[rank]
        while positions[rank] < len(row):
            self._cell = Cell(rank, positions[rank])
            if not self._do_action(row[positions[rank]]):
                break
            positions[rank] += 1
        return positions[rank] > begin

    # ---- actions

    def _do_action(self, action: Action) -> bool:
        """Does an action, unless it waits for a message."""
        rank = self._cell.rank
        if self._home(action.stage) != rank:
            raise self._error("the rank does not have this stage")
        if kind := RECEIVED.get(action.work):
            pair = self._home(action.peer), rank
            self._awaited[pair].append((kind, action.stage, action.microbatch))
            self._deliver(*pair)
            return True
        slots = self._input_slots(action)
        if self._waits(rank, slots):
            return False
        if self._cell == self._freed:
            self._slots[rank].pop(slots[0], None)
        values = [self._take(slot) for slot in slots]
        if action.work.sends:
            pair = rank, self._home(action.peer)
            self._sent[pair].append(values[0])
            self._deliver(*pair)
        else:
            self._compute(action, values)
        return True

    def _waits(self, rank: int, slots: list[Slot]) -> bool:
        """Whether a rank has asked for one of these values and has not received it yet."""
        for (_, target), awaited in self._awaited.items():
            if target == rank and any(slot in awaited for slot in slots):
                return True
        return False

    def _deliver(self, source: int, target: int) -> None:
        """Delivers sent values to receives, as far as there are both."""
        sent, awaited = self._sent[source, target], self._awaited[source, target]
        while sent and awaited:
            self._put(target, awaited.popleft(), sent.popleft())

    def _input_slots(self, action: Action) -> list[Slot]:
        """The inputs of an action."""
        stage, work, microbatch = action.stage, action.work, action.microbatch
        match work:
            case Work.FORWARD:
                if stage == 0:
                    return []
                return [(ENTERING, stage, microbatch)]
            case Work.BACKWARD | Work.INPUT:
                slots: list[Slot] = [(KEPT, stage, microbatch)]
                if stage + 1 < len(self.stages):
                    slots.append((RETURNING, stage, microbatch))
                return slots
            case Work.WEIGHT:
                return [(LEFT, stage, microbatch)]
            case Work.SEND_FORWARD:
                return [(ENTERING, action.peer, microbatch)]
            case _:
                return [(RETURNING, action.peer, microbatch)]

    def _home(self, stage: int) -> int:
        stage_to_rank = self._schedule.stage_to_rank
        if not 0 <= stage < len(stage_to_rank):
            raise self._error(f"there is no stage {stage}")
        return stage_to_rank[stage]

    def _compute(self, action: Action, taken: list[Env]) -> None:
        rank, stage = self._cell.rank, action.stage
        work, microbatch = action.work, action.microbatch
        staged, is_forward = self.stages[stage], work is Work.FORWARD
        part = staged.parts[work]
        begin = staged.inputs(microbatch) if is_forward else taken.pop(0)
        entering = taken[0].values() if taken else ()
        gone = self._moved.missing_weights(self._cell, stage)
        begin = {name: value for name, value in begin.items() if name not in gone}
        try:
            env = staged.run(part, begin, entering, microbatch)
        except KeyError as error:
            if error.args[0] not in self.machine.program.types:
                raise
            raise self._error(f"`{error.args[0]}` is not there") from None
        if part.outputs:
            slot = (RETURNING, stage - 1, microbatch)
            if is_forward:
                slot = (ENTERING, stage + 1, microbatch)
            self._put(rank, slot, {str(i): env[name] for i, name in enumerate(part.outputs)})
        if kept := self._kept.get(work):
            self._put(rank, (kept, stage, microbatch), env)
        self._add(stage, microbatch, staged.sums(work, env))

    def _add(self, stage: int, microbatch: int, parts: Env) -> None:
        lost = self._moved.lost_gradients(self._cell, stage)
        for name, part in parts.items():
            if name not in lost:
                self.sums.setdefault((stage, name), {})[microbatch] = part

    # ---- slots

    def _take(self, slot: Slot) -> Env:
        values = self._slots[self._cell.rank].pop(slot, None)
        if values is None:
            raise self._error(f"{_words(slot)} is not there")
        return values

    def _put(self, rank: int, slot: Slot, values: Env) -> None:
        if slot in self._slots[rank]:
            raise self._error(f"{_words(slot)} is there already, and nothing has taken it")
        self._slots[rank][slot] = values

    def _error(self, why: str) -> RowsError:
        rank, index = self._cell
        return RowsError(f"rank {rank}, cell {index}, `{self._schedule.rows[rank][index]}`: {why}")


def _words(slot: Slot) -> str:
    kind, stage, microbatch = slot
    return f"{kind} of stage {stage}, microbatch {microbatch}"
