"""The time of a pipeline's step: what each rank does before its row, the rows as a simulation does them, and the rest.

Weights of a rank's chunks are gathered from the step's begin on, each for its stages' first action, and gradients are
reduced from their last action on, while the rank's other stages work.  Non-goals: reductions that delay collectives of
stages over the same axes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from math import prod

from attrs import evolve, frozen

from ...ir import Op, Pipeline, Program, Region, Stmt
from ...ir.stages import crossing
from ...ops import Message, messages
from ...schedules.actions import Work
from ...schedules.cell_table import cell_table
from ...schedules.timeline import Timeline, Times, simulate
from ..communication import ChunkMoves
from ..hardware import Hardware
from ..memory.liveness import is_put_off
from ..stage_buckets import Chunk
from ..stage_program import StageProgram, rank_programs, stage_programs
from .breakdown import StepTime
from .prices import Prices, Sent, prices
from .seconds import of_message
from .timeline import HOST, Clocks, Walk, add

BUBBLE = "bubble"
"""The kind of time in which a rank of a pipeline waits for others."""


@frozen
class Move:
    """What is sent of a chunk, by axes and seconds; the stages that have it; how waiting for it is called."""

    stages: tuple[int, ...]
    sends: tuple[Sent, ...]
    waiting: str
    line: str


@frozen
class Rank:
    """What a rank of a pipeline does around its row.

    before      the clocks as its row begins, with its gathers begun
    ready       when the weights of its stages are there, and the move that brings them last
    reductions  of its chunks, in the order in which their stages end
    after       what it does once its gradients are reduced
    """

    before: Clocks
    ready: Mapping[int, tuple[float, Move]]
    reductions: tuple[Move, ...]
    after: Clocks


def of_pipeline(program: Program, pipeline: Pipeline, on: Hardware) -> StepTime:
    """The time of a step, on the rank that computes longest."""
    assert pipeline.schedule, "time: a pipeline without rows"
    parts, ranks = of_stages(program, on), of_ranks(program, pipeline, on)
    timeline = simulate(pipeline.schedule, times_of(program, pipeline, on, parts, ranks))
    busiest = max(range(len(ranks)), key=timeline.busy)
    return _Accounts(pipeline, timeline, ranks, str(program.axis(pipeline.axis).span)).of(busiest, parts)


def times_of(
    program: Program, pipeline: Pipeline, on: Hardware, parts: Sequence[Mapping[Work, Clocks]], ranks: Sequence[Rank]
) -> Times:
    """The seconds of each stage's actions and of messages, and when each stage can begin."""
    of = {kind: tuple(each[kind].gpu for each in parts) for kind in (Work.FORWARD, Work.INPUT, Work.WEIGHT)}
    homes = [ranks[home] for home in pipeline.stage_to_rank]
    begins = (rank.ready[stage][0] if stage in rank.ready else rank.before.gpu for stage, rank in enumerate(homes))
    cuts = tuple(_cuts(program, pipeline, on))
    return Times(of[Work.FORWARD], of[Work.INPUT], of[Work.WEIGHT], max(cuts), cuts, tuple(begins))


class _Accounts:
    """When the gradients of all ranks are reduced, and the account of one of them."""

    def __init__(self, pipeline: Pipeline, timeline: Timeline, ranks: Sequence[Rank], line: str) -> None:
        self._pipeline, self._timeline, self._ranks, self._line = pipeline, timeline, ranks, line
        ends = (end for rank in range(len(ranks)) for end, _ in self._reductions(rank))
        self._reduced = max([timeline.total, *ends])

    def of(self, rank: int, parts: Sequence[Mapping[Work, Clocks]]) -> StepTime:
        """The account of a rank: its actions, and what it waits for between them and after them."""
        own, schedule = self._ranks[rank], self._pipeline.schedule
        assert schedule, "time: a pipeline without rows"
        account = own.before.copy()
        for (stage, work), count in cell_table(schedule).counts.items():
            if not work.is_message and self._pipeline.stage_to_rank[stage] == rank:
                for kind in (Work.INPUT, Work.WEIGHT) if work is Work.BACKWARD else (work,):
                    add(account.spent, parts[stage][kind].spent, count)
                    add(account.sent, parts[stage][kind].sent, count)
        for waited, move in self._waits(rank):
            account.spent[move.waiting, move.line] += waited
        account.gpu = self._timeline.slots[rank][-1].end
        for end, move in sorted(self._reductions(rank), key=lambda it: it[0]):
            account.until(end, move.waiting, move.line)
            add(account.sent, dict(move.sends))
        add(account.spent, own.after.spent)
        add(account.sent, own.after.sent)
        total = self._reduced + max(each.after.gpu for each in self._ranks)
        account.spent[BUBBLE, self._line] += max(total - sum(account.spent.values()), 0.0)
        return StepTime(total, account.spent, account.sent, rank)

    def _reductions(self, rank: int) -> Iterator[tuple[float, Move]]:
        """When each of a rank's reductions is done, which begins when its stages are."""
        slots, free = self._timeline.slots[rank], dict[tuple[str, ...], float]()
        for move in self._ranks[rank].reductions:
            end = max(slot.end for slot in slots if slot.action.stage in move.stages)
            for axes, seconds in move.sends:
                end = free[axes] = max(end, free.get(axes, 0.0)) + seconds
            yield end, move

    def _waits(self, rank: int) -> Iterator[tuple[float, Move]]:
        """For how long a rank waits for weights, where its stages cannot begin for that."""
        own, free, left = self._ranks[rank], self._ranks[rank].before.gpu, {*self._ranks[rank].ready}
        for slot in self._timeline.slots[rank]:
            if slot.action.stage in left:
                left.remove(slot.action.stage)
                ready, move = own.ready[slot.action.stage]
                if slot.start == ready:
                    yield ready - free, move
            free = slot.end


# ---- around the rows


def of_ranks(program: Program, pipeline: Pipeline, on: Hardware) -> list[Rank]:
    """What each rank does around its row."""
    around = _Around(program, pipeline, on)
    return [around.of(rank) for rank in range(program.axis(pipeline.axis).size)]


class _Around:
    """Ranks' programs and chunks of one size are priced once."""

    def __init__(self, program: Program, pipeline: Pipeline, on: Hardware) -> None:
        self._program, self._pipeline, self._on = program, pipeline, on
        self._of_step = prices(program, on)
        self._prices, self._sends = dict[object, Prices](), dict[object, tuple[Sent, ...]]()
        body = program.region.body
        row = next(at for at, stmt in enumerate(body) if isinstance(stmt, Region))
        self._before, self._after = (
            [stmt for stmt in part if isinstance(stmt, Op)] for part in (body[:row], body[row:])
        )
        self._among = {op: [each.among for each in messages(program, op, program.types)] for op in self._after}

    def of(self, rank: int) -> Rank:
        """What a rank does around its row."""
        moves, own = ChunkMoves(self._program, self._pipeline, rank), rank_programs(self._program)[rank]
        key = (tuple(dim.size for dim in own.dims), own.params)
        of = self._prices.setdefault(key, prices(own, self._on, self._program.types))
        before, after = (Walk(own, self._on, of) for _ in range(2))
        before.update([op for op in self._before if op not in moves.ops])
        ready = dict[int, tuple[float, Move]]()
        for move in (self._move(moves, *pair) for pair in moves.gathers()):
            end = max(map(before.send, move.sends))
            ready |= {stage: (end, move) for stage in move.stages if end >= ready.get(stage, (0.0,))[0]}
        sums = tuple(self._move(moves, *pair) for pair in moves.reductions())
        after.update([op for op in self._after if op not in moves.ops and self._takes_part(rank, op)])
        return Rank(before.clocks, ready, sums, after.clocks)

    def _move(self, moves: ChunkMoves, chunk: Chunk, op: Op) -> Move:
        price, key = self._of_step(op), (chunk.bucket, chunk.size, id(op))
        if key not in self._sends:
            sent = moves.messages(chunk, op)
            seconds = (of_message(self._program, it, self._on, prod(it.shape)) for it in sent)
            self._sends[key] = tuple(zip((it.axes for it in sent), seconds, strict=True))
        return Move(chunk.stages, self._sends[key], price.waiting, price.line)

    def _takes_part(self, rank: int, op: Op) -> bool:
        return all(not among or rank in among for among in self._among[op])


# ---- in the rows


def of_stages(program: Program, on: Hardware) -> list[Mapping[Work, Clocks]]:
    """The clocks of each stage; those that do the same ops in as many layers, as all in the middle, are walked once."""
    known, found = dict[object, Mapping[Work, Clocks]](), list[Mapping[Work, Clocks]]()
    for stage in stage_programs(program):
        stmts = (*stage.forward.body, *stage.backward.body)
        ops = (id(stmt.body) if isinstance(stmt, Region) else id(stmt) for stmt in stmts)
        key = (*map(len, stage.layers.values()), *ops)
        known[key] = known.get(key) or _parts(program, stage, on)
        found.append(known[key])
    return found


def _parts(program: Program, stage: StageProgram, on: Hardware) -> dict[Work, Clocks]:
    """The clocks after each part of a stage's work on a microbatch; backward is one where no row splits it.

    The host issues an action's ops while the GPU does them, and the next action once it has issued these.
    """
    received = {value.name: value.type for value in (*stage.forward.inputs, *stage.backward.inputs)}
    backward = stage.backward.body
    pipeline = stage.program.pipeline
    assert pipeline, "time: a stage without a pipeline"
    splits, line = pipeline.splits, str(program.axis(pipeline.axis).span)
    bodies = {
        Work.FORWARD: stage.forward.body,
        Work.INPUT: _part(backward, put_off=False) if splits else backward,
        Work.WEIGHT: _part(backward, put_off=True) if splits else (),
    }
    of, found = prices(stage.program, on, {**program.types, **received}), dict[Work, Clocks]()
    for work, body in bodies.items():
        walk = Walk(stage.program, on, of)
        if body:
            walk.body(body)
            walk.clocks.until(walk.clocks.host + on.action, HOST, line)
        found[work] = walk.clocks
    return found


def _part(body: Sequence[Stmt], *, put_off: bool) -> tuple[Stmt, ...]:
    """The ops of a backward that make gradients of weights which may be put off, or the others."""
    return tuple(
        evolve(stmt, body=_part(stmt.body, put_off=put_off)) if isinstance(stmt, Region) else stmt
        for stmt in body
        if isinstance(stmt, Region) or is_put_off(stmt) == put_off
    )


def _cuts(program: Program, pipeline: Pipeline, on: Hardware) -> Iterator[float]:
    """Seconds in which the values of a microbatch cross from a stage to the next, cut by cut."""
    known = dict[object, float]()
    for values, ranks in zip(crossing(program, pipeline), pairwise(pipeline.stage_to_rank), strict=True):
        among = tuple(sorted({*ranks}))
        key = (among, *(it.name for it in values))
        if key not in known:
            sent = [Message("rotate", it.name, (pipeline.axis,), it.type.dtype, (), among=among) for it in values]
            sizes = (program.elements(it.type) for it in values)
            known[key] = sum(of_message(program, *each) for each in zip(sent, repeat(on), sizes))
        yield known[key] if among[1:] else 0.0
