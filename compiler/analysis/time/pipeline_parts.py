"""The work of each rank of a pipeline around its row, and how long each stage's actions and
messages take.

Purpose: what the rows are simulated with.  Each kind of stage and of chunk is priced once.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

from attrs import evolve, frozen

from ...ir import Op, Pipeline, Program, Region, Stmt
from ...ir.stages import crossing
from ...ops import Message, messages
from ...schedules.actions import Work
from ..communication import ChunkMoves
from ..hardware import Hardware
from ..memory.liveness import is_put_off
from ..stage_buckets import Chunk
from ..stage_program import StageProgram, rank_programs, stage_programs
from .clocks import HOST, Clocks
from .prices import Prices, Sent, prices
from .seconds import get_message_seconds
from .timeline import Walk


@frozen
class Move:
    """A chunk's messages, by axes and seconds; its stages; the kinds of the sending and of the wait
    for it.
    """

    stages: tuple[int, ...]
    sends: tuple[Sent, ...]
    kind: str
    waiting: str
    line: str


@frozen
class Rank:
    """The work of a rank of a pipeline around its row.

    before      the clocks as its row begins, with its gathers begun
    ready       when the weights of its stages are there, and the move that brings them last
    reductions  of its chunks, in the order that their stages end in
    after       what it does once its gradients are reduced
    """

    before: Clocks
    ready: Mapping[int, tuple[float, Move]]
    reductions: tuple[Move, ...]
    after: Clocks


# ---- around the rows


def get_rank_work(
    program: Program, pipeline: Pipeline, on: Hardware, *, record: bool = False
) -> list[Rank]:
    """The work of each rank around its row."""
    around = _Around(program, pipeline, on, record)
    return [around.get_work_of_rank(rank) for rank in range(program.axis(pipeline.axis).size)]


class _Around:
    """Ranks' programs and chunks of one size are priced once."""

    def __init__(self, program: Program, pipeline: Pipeline, on: Hardware, record: bool) -> None:
        self._program, self._pipeline, self._on, self._record = program, pipeline, on, record
        self._of_step = prices(program, on)
        self._prices, self._sends = dict[object, Prices](), dict[object, tuple[Sent, ...]]()
        body = program.region.body
        row = next(place for place, stmt in enumerate(body) if isinstance(stmt, Region))
        self._before = [stmt for stmt in body[:row] if isinstance(stmt, Op)]
        # with the ranks that take part in each message, if not all do
        self._after = list[tuple[Op, list[tuple[int, ...]]]]()
        for op in body[row:]:
            if isinstance(op, Op):
                sent = messages(program, op, program.types)
                self._after.append((op, [message.among for message in sent if message.among]))

    def get_work_of_rank(self, rank: int) -> Rank:
        """The work of a rank around its row."""
        moves = ChunkMoves(self._program, self._pipeline, rank)
        rank_program = rank_programs(self._program)[rank]
        key = (tuple(dim.size for dim in rank_program.dims), rank_program.params)
        price_of = self._prices.setdefault(key, prices(rank_program, self._on, self._program.types))
        before = Walk(rank_program, self._on, price_of, self._record)
        before.update([op for op in self._before if op not in moves.ops])
        ready = dict[int, tuple[float, Move]]()
        for chunk, op in moves.gathers():
            move = self._move(moves, chunk, op)
            end = max(before.send(call, move.kind, move.line) for call in move.sends)
            for stage in move.stages:
                if stage not in ready or end >= ready[stage][0]:
                    ready[stage] = end, move
        reductions = tuple(self._move(moves, chunk, op) for chunk, op in moves.reductions())
        after = Walk(rank_program, self._on, price_of, self._record)
        after_ops = list[Op]()
        for op, groups in self._after:
            if op not in moves.ops and all(rank in group for group in groups):
                after_ops.append(op)
        after.update(after_ops)
        return Rank(before.clocks, ready, reductions, after.clocks)

    def _move(self, moves: ChunkMoves, chunk: Chunk, op: Op) -> Move:
        price, key = self._of_step(op), (chunk.bucket, chunk.size, id(op))
        if key not in self._sends:
            sends = list[Sent]()
            for message in moves.messages(chunk, op):
                seconds = get_message_seconds(self._program, message, self._on, prod(message.shape))
                sends.append((message.axes, seconds))
            self._sends[key] = tuple(sends)
        return Move(chunk.stages, self._sends[key], price.sending, price.waiting, price.line)


# ---- in the rows


def get_stage_clocks(
    program: Program, on: Hardware, *, record: bool = False, splits: bool = False
) -> list[Mapping[Work, Clocks]]:
    """The clocks of each stage.

    Stages that do the same ops in as many layers, as all in the middle, are walked once.  Backward
    is in two parts if it `splits`, or rows do.
    """
    clocks_by_kind = dict[object, Mapping[Work, Clocks]]()
    clocks_by_stage = list[Mapping[Work, Clocks]]()
    for stage in stage_programs(program):
        stmts = (*stage.forward.body, *stage.backward.body)
        ops = (id(stmt.body) if isinstance(stmt, Region) else id(stmt) for stmt in stmts)
        kind = (*map(len, stage.layers.values()), *ops)
        if kind not in clocks_by_kind:
            clocks_by_kind[kind] = _parts(program, stage, on, record, splits)
        clocks_by_stage.append(clocks_by_kind[kind])
    return clocks_by_stage


def _parts(
    program: Program, stage: StageProgram, on: Hardware, record: bool, splits: bool
) -> dict[Work, Clocks]:
    """The clocks after each part of a stage's work on a microbatch; backward is one where no row
    splits it.

    The host issues an action's ops while the GPU does them, and the next action once it has issued
    these.
    """
    types = {**program.types}
    for value in (*stage.forward.inputs, *stage.backward.inputs):
        types[value.name] = value.type
    pipeline = stage.program.pipeline
    assert pipeline, "time: a stage without a pipeline"
    bodies = {
        Work.FORWARD: stage.forward.body,
        Work.INPUT: stage.backward.body,
        Work.WEIGHT: (),
    }
    if splits or pipeline.splits:
        bodies[Work.INPUT] = _part(stage.backward.body, put_off=False)
        bodies[Work.WEIGHT] = _part(stage.backward.body, put_off=True)
    line = str(program.axis(pipeline.axis).span)
    price_of = prices(stage.program, on, types)
    clocks_by_work = dict[Work, Clocks]()
    for work, body in bodies.items():
        walk = Walk(stage.program, on, price_of, record)
        if body:
            walk.body(body)
            walk.clocks.until(walk.clocks.host + on.action, HOST, line)
        clocks_by_work[work] = walk.clocks
    return clocks_by_work


def _part(body: Sequence[Stmt], *, put_off: bool) -> tuple[Stmt, ...]:
    """The ops of a backward that make gradients of weights which may be put off, or the others."""
    part = list[Stmt]()
    for stmt in body:
        if isinstance(stmt, Region):
            part.append(evolve(stmt, body=_part(stmt.body, put_off=put_off)))
        elif is_put_off(stmt) == put_off:
            part.append(stmt)
    return tuple(part)


def cuts(program: Program, pipeline: Pipeline, on: Hardware) -> Iterator[float]:
    """Seconds that the values of a microbatch take from a stage to the next, cut by cut."""
    seconds_by_kind = dict[object, float]()
    for values, ranks in zip(
        crossing(program, pipeline), pairwise(pipeline.stage_to_rank), strict=True
    ):
        among = tuple(sorted({*ranks}))
        kind = (among, *(value.name for value in values))
        if kind not in seconds_by_kind:
            seconds = list[float]()
            for value in values:
                message = Message(
                    "rotate", value.name, (pipeline.axis,), value.type.dtype, (), among=among
                )
                size = program.elements(value.type)
                seconds.append(get_message_seconds(program, message, on, size))
            seconds_by_kind[kind] = sum(seconds)
        is_same_rank = len(among) == 1
        yield 0.0 if is_same_rank else seconds_by_kind[kind]
