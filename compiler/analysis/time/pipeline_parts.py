"""The work of each rank of a pipeline around its row, and how long each stage's actions and
messages take.

Purpose: what the rows are simulated with.  Each kind of stage and of chunk is priced once.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
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
from .seconds import of_message
from .timeline import Walk


@frozen
class Move:
    """A chunk's sending, by axes and seconds; its stages; the kinds of sending and of waiting
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
    reductions  of its chunks, in the order in which their stages end
    after       what it does once its gradients are reduced
    """

    before: Clocks
    ready: Mapping[int, tuple[float, Move]]
    reductions: tuple[Move, ...]
    after: Clocks


# ---- around the rows


def of_ranks(
    program: Program, pipeline: Pipeline, on: Hardware, *, record: bool = False
) -> list[Rank]:
    """The work of each rank around its row."""
    around = _Around(program, pipeline, on, record)
    return [around.of(rank) for rank in range(program.axis(pipeline.axis).size)]


class _Around:
    """Ranks' programs and chunks of one size are priced once."""

    def __init__(self, program: Program, pipeline: Pipeline, on: Hardware, record: bool) -> None:
        self._program, self._pipeline, self._on, self._record = program, pipeline, on, record
        self._of_step = prices(program, on)
        self._prices, self._sends = dict[object, Prices](), dict[object, tuple[Sent, ...]]()
        body = program.region.body
        row = next(at for at, stmt in enumerate(body) if isinstance(stmt, Region))
        self._before = [stmt for stmt in body[:row] if isinstance(stmt, Op)]
        after = [stmt for stmt in body[row:] if isinstance(stmt, Op)]
        self._after = [
            (op, [each.among for each in messages(program, op, program.types)]) for op in after
        ]

    def of(self, rank: int) -> Rank:
        """The work of a rank around its row."""
        moves, own = (
            ChunkMoves(self._program, self._pipeline, rank),
            rank_programs(self._program)[rank],
        )
        key = (tuple(dim.size for dim in own.dims), own.params)
        of = self._prices.setdefault(key, prices(own, self._on, self._program.types))
        before, after = (Walk(own, self._on, of, self._record) for _ in range(2))
        before.update([op for op in self._before if op not in moves.ops])
        ready = dict[int, tuple[float, Move]]()
        for move in (self._move(moves, *pair) for pair in moves.gathers()):
            end = max(before.send(each, move.kind, move.line) for each in move.sends)
            ready |= {
                stage: (end, move) for stage in move.stages if end >= ready.get(stage, (0.0,))[0]
            }
        sums = tuple(self._move(moves, *pair) for pair in moves.reductions())
        after.update(
            [
                op
                for op, among in self._after
                if op not in moves.ops and all(rank in it for it in among if it)
            ]
        )
        return Rank(before.clocks, ready, sums, after.clocks)

    def _move(self, moves: ChunkMoves, chunk: Chunk, op: Op) -> Move:
        price, key = self._of_step(op), (chunk.bucket, chunk.size, id(op))
        if key not in self._sends:
            sent = moves.messages(chunk, op)
            seconds = (of_message(self._program, it, self._on, prod(it.shape)) for it in sent)
            self._sends[key] = tuple(zip((it.axes for it in sent), seconds, strict=True))
        return Move(chunk.stages, self._sends[key], price.sending, price.waiting, price.line)


# ---- in the rows


def of_stages(
    program: Program, on: Hardware, *, record: bool = False, splits: bool = False
) -> list[Mapping[Work, Clocks]]:
    """The clocks of each stage; those that do the same ops in as many layers, as all in the middle,
    are walked once.

    Backward is in two parts if it `splits`, or rows do.
    """
    known, found = dict[object, Mapping[Work, Clocks]](), list[Mapping[Work, Clocks]]()
    for stage in stage_programs(program):
        stmts = (*stage.forward.body, *stage.backward.body)
        ops = (id(stmt.body) if isinstance(stmt, Region) else id(stmt) for stmt in stmts)
        key = (*map(len, stage.layers.values()), *ops)
        known[key] = known.get(key) or _parts(program, stage, on, record, splits)
        found.append(known[key])
    return found


def _parts(
    program: Program, stage: StageProgram, on: Hardware, record: bool, splits: bool
) -> dict[Work, Clocks]:
    """The clocks after each part of a stage's work on a microbatch; backward is one where no row
    splits it.

    The host issues an action's ops while the GPU does them, and the next action once it has issued
    these.
    """
    received = {value.name: value.type for value in (*stage.forward.inputs, *stage.backward.inputs)}
    backward = stage.backward.body
    pipeline = stage.program.pipeline
    assert pipeline, "time: a stage without a pipeline"
    splits, line = splits or pipeline.splits, str(program.axis(pipeline.axis).span)
    bodies = {
        Work.FORWARD: stage.forward.body,
        Work.INPUT: _part(backward, put_off=False) if splits else backward,
        Work.WEIGHT: _part(backward, put_off=True) if splits else (),
    }
    of, found = prices(stage.program, on, {**program.types, **received}), dict[Work, Clocks]()
    for work, body in bodies.items():
        walk = Walk(stage.program, on, of, record)
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


def cuts(program: Program, pipeline: Pipeline, on: Hardware) -> Iterator[float]:
    """Seconds in which the values of a microbatch cross from a stage to the next, cut by cut."""
    known = dict[object, float]()
    for values, ranks in zip(
        crossing(program, pipeline), pairwise(pipeline.stage_to_rank), strict=True
    ):
        among = tuple(sorted({*ranks}))
        key = (among, *(it.name for it in values))
        if key not in known:
            sent = [
                Message("rotate", it.name, (pipeline.axis,), it.type.dtype, (), among=among)
                for it in values
            ]
            sizes = (program.elements(it.type) for it in values)
            known[key] = sum(of_message(program, *each) for each in zip(sent, repeat(on), sizes))
        yield known[key] if among[1:] else 0.0
