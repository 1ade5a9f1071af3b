"""The time of a pipeline's step: what each rank does before its row, the rows as a simulation does
them, and what follows.

Weights of a rank's chunks are gathered from the step's begin on, each for its stages' first action,
and gradients are reduced from their last action on, while the rank's other stages work.  Non-goals:
reductions that delay collectives of stages over the same axes.
"""

from collections.abc import Iterator, Mapping

from ...ir import Pipeline, Program
from ...schedules.actions import Action, Work
from ...schedules.cell_table import cell_table
from ...schedules.timeline import Times, simulate
from ..hardware import Hardware
from .clocks import BUBBLE, Clocks, StepTime, add
from .pipeline_parts import Move, cuts, get_rank_work, get_stage_clocks

PARTS = {Work.BACKWARD: (Work.INPUT, Work.WEIGHT)}
"""The parts of actions that have several."""


class Rows:
    """The rows of a step in time, and what ranks do around them.

    reduced  when the gradients of all ranks are reduced
    """

    def __init__(
        self, program: Program, pipeline: Pipeline, on: Hardware, *, record: bool = False
    ) -> None:
        assert pipeline.schedule, "time: a pipeline without rows"
        self.schedule, self.line = pipeline.schedule, str(program.axis(pipeline.axis).span)
        self.parts = get_stage_clocks(program, on, record=record)
        self.ranks = get_rank_work(program, pipeline, on, record=record)
        self.times = self._times(tuple(cuts(program, pipeline, on)))
        self.timeline = simulate(pipeline.schedule, self.times)
        if on.contention:
            self.parts = self._get_slowed_parts(on.contention)
            self.times = self._times(self.times.cuts)
            self.timeline = simulate(pipeline.schedule, self.times)
        self.reduced = self.timeline.total
        for rank in range(len(self.ranks)):
            for _, end, _ in self.reductions(rank):
                self.reduced = max(self.reduced, end)

    def _times(self, cuts: tuple[float, ...]) -> Times:
        """The seconds of each stage's actions and of messages, and when each stage can begin."""
        begins = list[float]()
        for stage, owner in enumerate(self.schedule.stage_to_rank):
            rank = self.ranks[owner]
            begins.append(rank.ready[stage][0] if stage in rank.ready else rank.before.gpu)
        forward, input, weight = list[float](), list[float](), list[float]()
        for parts in self.parts:
            forward.append(parts[Work.FORWARD].gpu)
            input.append(parts[Work.INPUT].gpu)
            weight.append(parts[Work.WEIGHT].gpu)
        return Times(
            tuple(forward),
            tuple(input),
            tuple(weight),
            max(cuts, default=0.0),
            cuts,
            tuple(begins),
        )

    def _get_slowed_parts(self, lost: float) -> list[Mapping[Work, Clocks]]:
        """The clocks of each stage beside what its rank sends around its row: gathers, and
        reductions of gradients.

        The GPU loses a part of its rate meanwhile.  A rank's loss is shared out over all its
        actions, since which of them run beside a collective changes as they take longer.
        """
        slower = list[float]()
        for rank in range(len(self.ranks)):
            busy = self.timeline.busy(rank)
            slower.append(1 + lost / (1 - lost) * self._beside(rank) / busy if busy else 1.0)
        slowed = list[Mapping[Work, Clocks]]()
        for rank, parts in zip(self.schedule.stage_to_rank, self.parts, strict=True):
            slowed.append({work: part.make_stretched(slower[rank]) for work, part in parts.items()})
        return slowed

    def _beside(self, rank: int) -> float:
        """The seconds that a rank computes its row and sends gradients or gets weights at the same
        time.
        """
        sent = [(begin, end) for begin, end, _ in self.reductions(rank)]
        ready = [end for end, _ in self.ranks[rank].ready.values()]
        if ready:
            sent.append((self.ranks[rank].before.gpu, max(ready)))
        seconds = 0.0
        for slot in self.timeline.slots[rank]:
            for begin, end in sent:
                seconds += max(min(slot.end, end) - max(slot.start, begin), 0.0)
        return seconds

    @property
    def seconds(self) -> float:
        """Seconds of the step: the last rank is done."""
        return self.reduced + max(rank.after.gpu for rank in self.ranks)

    def clocks(self, action: Action) -> list[Clocks]:
        """Clocks of the parts of an action, one after the other."""
        return [self.parts[action.stage][part] for part in PARTS.get(action.work, (action.work,))]

    def account(self, rank: int) -> StepTime:
        """The account of a rank: its actions, and what it waits for between them and after them."""
        account = self.ranks[rank].before.copy()
        for (stage, work), count in cell_table(self.schedule).counts.items():
            if not work.is_message and self.schedule.stage_to_rank[stage] == rank:
                for part in self.clocks(Action(stage, work, 0)):
                    add(account.spent, part.spent, count)
                    add(account.sent, part.sent, count)
        for begin, end, move in self.waits(rank):
            account.spent[move.waiting, move.line] += end - begin
        account.gpu = self.timeline.slots[rank][-1].end
        for _, end, move in self.reductions(rank):
            account.until(end, move.waiting, move.line)
            add(account.sent, dict(move.sends))
        add(account.spent, self.ranks[rank].after.spent)
        add(account.sent, self.ranks[rank].after.sent)
        account.spent[BUBBLE, self.line] += max(self.seconds - sum(account.spent.values()), 0.0)
        return StepTime(self.seconds, account.spent, account.sent, rank)

    def reductions(self, rank: int) -> Iterator[tuple[float, float, Move]]:
        """When each of a rank's reductions begins, as its stages have ended and its group is
        free, and when it ends.
        """
        slots, free = self.timeline.slots[rank], dict[tuple[str, ...], float]()
        for move in self.ranks[rank].reductions:
            end = max(slot.end for slot in slots if slot.action.stage in move.stages)
            begin = max(end, free.get(move.sends[0][0], 0.0))
            for axes, seconds in move.sends:
                end = free[axes] = max(end, free.get(axes, 0.0)) + seconds
            yield begin, end, move

    def waits(self, rank: int) -> Iterator[tuple[float, float, Move]]:
        """From when to when a rank waits for weights, where its stages cannot begin for that."""
        work = self.ranks[rank]
        free = work.before.gpu
        waiting_stages = {*work.ready}
        for slot in self.timeline.slots[rank]:
            stage = slot.action.stage
            if stage in waiting_stages:
                waiting_stages.remove(stage)
                ready, move = work.ready[stage]
                if slot.start == ready:
                    yield free, ready, move
            free = slot.end


def get_pipeline_step_time(program: Program, pipeline: Pipeline, on: Hardware) -> StepTime:
    """The time of a step, on the rank that is busy longest."""
    rows = Rows(program, pipeline, on)
    return rows.account(max(range(len(rows.ranks)), key=rows.timeline.busy))
