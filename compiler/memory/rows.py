"""What a rank of a pipeline holds over its row: what its stages keep of microbatches, and what crosses the cuts.

Purpose: the row action by action; while one runs, what it does is in memory as `walk` has it of the stage alone.
Of what is sent one value of each kind is under way, as the runtime has it, and of what is received the memory is there
from where its message begins.
Non-goals: what an allocator loses.
"""

from collections.abc import Iterator

from attrs import evolve, frozen

from ..ir import ITEM_BYTES, Enter, Pipeline, Program, Region, Value, types, walk
from ..ops.saved import Device
from ..portions import of_stage
from ..schedules.actions import Action, Work
from ..stages import Stage as Cuts
from ..stages import crossing, groups, stages
from .kept import Keeper, Kept
from .lifetimes import is_put_off, put_off
from .storages import Cut, Storages
from .walk import Moment, Walk


@frozen
class Stage:
    """What a stage holds of a microbatch.

    kept      what autograd keeps of it, each storage once
    entered   bytes of what enters it that autograd does not keep; it is there as long
    later     bytes that the weights' part of backward needs of the part before it
    largest   of the gradients that the weights' part makes, which goes as soon as it is added
    forward   the moment when most is there, but of other microbatches
    backward  likewise
    input     likewise, in backward without the weights' part
    """

    kept: tuple[Kept, ...]
    entered: int
    later: int
    largest: int
    forward: Moment
    backward: Moment
    input: Moment

    @property
    def held(self) -> int:
        """Bytes from forward to backward."""
        return sum(it.total for it in self.kept) + self.entered


def stages_of(program: Program) -> list[Stage]:
    """All stages of a pipeline, each by itself."""
    assert program.pipeline, "memory: no pipeline"
    return [_stage(program, program.pipeline, number) for number in range(len(program.pipeline.homes))]


def _stage(program: Program, pipeline: Pipeline, number: int) -> Stage:
    device = device_of(program)
    storages = Storages(of_stage(program, number), _cut(program, pipeline, number))
    keeper = Keeper(storages, device)
    walked = Walk(storages, keeper, device).fullest
    entered = sum(storages.bytes(name) for name in storages.cut.entering if storages.root(name) not in keeper.all)
    kept = tuple(keeper.all.values())
    body = storages.backward.body
    largest = max((storages.bytes(op.outputs[0].name) for op in walk(body) if is_put_off(op)), default=0)
    later = sum(put_off(storages, body).values())
    apart = Walk(storages, keeper, device, splits=True).fullest
    back = walked["backward"]
    first = apart.get("backward", back)  # of an embedding alone, all of backward is put off
    return Stage(kept, entered, later, largest, walked["forward"], back, first)


def device_of(program: Program) -> Device:
    """A GPU, where the cluster names one, or else the CPU."""
    return "cuda" if program.cluster.gpu else "cpu"


def _cut(program: Program, pipeline: Pipeline, number: int) -> Cut:
    """What enters a stage, from before and from behind, as its statements call it; and where its turns begin."""
    all_ = stages(program, pipeline)
    (region,) = (stmt for stmt in program.region.body if isinstance(stmt, Region))
    forward, backward = (groups(pipeline, block.body)[1] for block in region.body if isinstance(block, Region))
    enters = _entering(all_[number], forward) if number else ()
    returns = _returning(all_[number + 1], forward, backward) if number < len(all_) - 1 else ()
    first = dict(zip(pipeline.dims, (turns.start for turns in all_[number].turns), strict=True))
    return Cut(enters, returns, first, types(program))


def _entering(stage: Cuts, forward: list[Region]) -> tuple[str, ...]:
    """What the repeat takes in which a stage begins; if it has no turns, what that makes."""
    repeat = forward[stage.begins]
    return _taken(repeat) if stage.turns[stage.begins] else _made(repeat, len(_taken(repeat)))


def _returning(behind: Cuts, forward: list[Region], backward: list[Region]) -> tuple[str, ...]:
    """The gradients that the stage `behind` hands back, of what enters it."""
    repeat, back = forward[behind.begins], backward[::-1][behind.begins]
    turns, count = behind.turns[behind.begins], len(_taken(repeat))
    return _made(back, count) if turns and turns.start == 0 else _taken(back)[:count]


def _taken(repeat: Region) -> tuple[str, ...]:
    return tuple(arg.source for arg in repeat.args if arg.enter is Enter.CARRY)


def _made(repeat: Region, count: int) -> tuple[str, ...]:
    return tuple(value.name for value in repeat.results[:count])


def fullest(program: Program, rank: int, of: dict[int, Stage]) -> Moment:
    """The moment of a rank's row when most is in memory beside what always is."""
    return max(_Row(program, rank, of).moments(), key=lambda it: it.bytes)


class _Row:
    """A rank that does its row: what is kept of each stage and microbatch, and what is between actions."""

    def __init__(self, program: Program, rank: int, of: dict[int, Stage]) -> None:
        assert program.pipeline, "memory: no pipeline"
        assert program.pipeline.schedule, "memory: no rows"
        self._homes, self._of, self._rank = program.pipeline.homes, of, rank
        self._row = program.pipeline.schedule.rows[rank]
        cuts = crossing(program, program.pipeline)
        self._sizes = [sum(_bytes(program, value) for value in values) for values in cuts]
        self._kept: dict[tuple[int, int], int] = {}
        self._all_kept = 0
        self._between: dict[tuple[str, int, int], int] = {}  # bytes of what is handed from stage to stage

    def moments(self) -> Iterator[Moment]:
        """While each action that computes runs."""
        for action in self._row:
            if action.work.is_message:
                self._move(action)
            else:
                yield self._during(action)
                self._after(action)

    def _during(self, action: Action) -> Moment:
        """What the action does, beside all other microbatches."""
        stage, work = self._of[action.stage], action.work
        at = (action.stage, action.microbatch)
        others = self._all_kept - (0 if work is Work.WEIGHT else self._kept.get(at, 0))
        taken = {Work.FORWARD: "x", Work.BACKWARD: "dy", Work.INPUT: "dy"}.get(work, "")
        between = sum(self._between.values()) - self._between.get((taken, *at), 0)
        match work:
            case Work.FORWARD:
                own = stage.forward
            case Work.BACKWARD:
                own = stage.backward
            case Work.INPUT:
                own = stage.input
            case _:
                own = evolve(stage.backward, kept=0, other=stage.largest)
        return evolve(own, kept=own.kept + others, other=own.other + between)

    def _after(self, action: Action) -> None:
        stage, microbatch = at = action.stage, action.microbatch
        match action.work:
            case Work.FORWARD:
                self._keep(at, self._of[stage].held)
                self._hand("x", stage, stage + 1, microbatch)
            case Work.WEIGHT:
                self._keep(at, 0)
            case work:
                self._keep(at, self._of[stage].later if work is Work.INPUT else 0)
                self._hand("dy", stage, stage - 1, microbatch)

    def _keep(self, at: tuple[int, int], size: int) -> None:
        """Keeps so much of a microbatch in a stage from now on."""
        self._all_kept += size - self._kept.pop(at, 0)
        if size:
            self._kept[at] = size

    def _hand(self, what: str, stage: int, to: int, microbatch: int) -> None:
        """Takes what the stage is given, and leaves what it makes for another one, here or to be sent."""
        self._between.pop((what, stage, microbatch), None)
        if 0 <= to < len(self._homes):
            here = self._homes[to] == self._rank
            key = (what, to, microbatch) if here else (f"{what} to send", stage, microbatch)
            self._between[key] = self._sizes[min(stage, to)]

    def _move(self, action: Action) -> None:
        """Begins a message: of those that a stage sends one way, the one before is gone."""
        stage, microbatch = action.stage, action.microbatch
        what = "x" if action.work in (Work.SEND_FORWARD, Work.RECEIVE_FORWARD) else "dy"
        if action.work in (Work.RECEIVE_FORWARD, Work.RECEIVE_BACKWARD):
            self._between[what, stage, microbatch] = self._sizes[stage - (what == "x")]
        else:
            self._between[f"{what} under way", stage, 0] = self._between.pop((f"{what} to send", stage, microbatch))


def _bytes(program: Program, value: Value) -> int:
    return program.elements(value.type) * ITEM_BYTES[value.type.dtype]
