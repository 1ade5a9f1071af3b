"""The communication of a program's step and the number of its parameters, read off the IR.

Purpose: one list of collectives, for the user, for `plan.json` and for the test that holds a
recorded run against it.  With a pipeline there is one list per rank of its axis, with the messages
to other stages.  Non-goals: time and memory; in which order a pipeline's rank does what its stages
do (its row says so).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod

from attrs import evolve

from ..ir import MICROBATCHES, Names, Op, Pipeline, Program, Region, Stmt, Type, base, once, walk
from ..ir.stages import crossing
from ..ops import Message, messages
from ..schedules.actions import Action, Work
from .collective import Collective, Use, Where
from .stage_buckets import Chunk, chunk_moves, chunks, needed, with_chunks
from .stage_program import rank_programs, stage_programs


def collectives(program: Program, rank: int = 0) -> tuple[Collective, ...]:
    """Everything that a rank communicates in one step, in the order in which it begins; messages
    after their stage's.

    `program` has been differentiated.  `rank` is that along the pipeline's axis, if there is one.
    """
    assert program.region.kind == "step", f"account: a program after {program.after} has no step"
    if not program.pipeline:
        account = _Account(program, program.types).within(program.region, (), "step")
        return tuple(each for each in account if each.ranks > 1)
    return _of_ranks(program)[rank]


def evaluation(program: Program, rank: int = 0) -> tuple[Collective, ...]:
    """The communication of `eval_step`: the forward of the same step, and the sums of count and
    loss.
    """
    sums = {base(program.region.yields[0].name), base(program.region.yields[2].name)}
    before = {"all_gather"}  # of parameters
    return tuple(
        c
        for c in collectives(program, rank)
        if c.where == "forward" or (c.where == "step" and (base(c.value) in sums or c.op in before))
    )


def places(program: Program) -> range:
    """The ranks along the pipeline's axis, or 0 for all ranks."""
    return range(program.axis(program.pipeline.axis).size if program.pipeline else 1)


def parameter_count(program: Program) -> int:
    """The number of parameters of the model, over all ranks, padding left out."""
    return sum(prod(program.valid(dim) for dim in param.type.dims) for param in program.params)


def active_count(program: Program) -> int:
    """The number of parameters that compute for a token: of experts those that it chose."""
    chosen = {dim.name: program.dim(dim.chosen or dim.name) for dim in program.dims}
    return sum(prod(chosen[dim].valid for dim in param.type.dims) for param in program.params)


@once
def _of_ranks(program: Program) -> tuple[tuple[Collective, ...], ...]:
    assert program.pipeline, "account: no pipeline"
    of_stages, of_steps = _of_stages(program), _of_steps(program)
    return tuple(
        tuple(_of_rank(program, program.pipeline, rank, of_stages, of_steps[rank]))
        for rank in places(program)
    )


Around = tuple[list[Collective], list[Collective]]
"""The collectives before a rank's row, and after it."""


def _of_rank(
    program: Program,
    pipeline: Pipeline,
    rank: int,
    of_stages: Sequence[list[Collective]],
    of_step: Around,
) -> Iterator[Collective]:
    """The collectives of a pipeline rank: before its row, of each of its stages, when these
    end, and after the row.
    """
    before, after = of_step
    moves = ChunkMoves(program, pipeline, rank)
    yield from _by_rank(before, rank)
    yield from moves.collectives(moves.gathers())
    for number in pipeline.stages_of(rank):
        yield from (evolve(each, rank=rank, stage=number) for each in of_stages[number])
        yield from _messages(program, pipeline, number)
    yield from moves.collectives(moves.reductions())
    yield from _by_rank(after, rank)


def _by_rank(found: Iterable[Collective], rank: int) -> Iterator[Collective]:
    """The entries of the step that a rank takes part in."""
    return (evolve(each, rank=rank) for each in found if not each.among or rank in each.among)


def _of_stages(program: Program) -> list[list[Collective]]:
    """The collectives of each stage in its actions; stages that do the same are read once."""
    known: dict[object, list[Collective]] = {}
    found: list[list[Collective]] = []
    for stage in stage_programs(program):
        if stage.kind not in known:
            microbatches = stage.program.microbatches
            account = _Account(stage.program, program.types, stage.layers)
            known[stage.kind] = [*account.within(microbatches, (microbatches.dim,), "step")]
        found.append(known[stage.kind])
    return found


def _of_steps(program: Program) -> list[Around]:
    """The collectives of each rank around its row; ranks whose buckets are as large are read
    once.
    """
    chunk_ops = _chunk_ops(program)
    rest = [stmt for stmt in program.region.body if stmt not in chunk_ops]
    row = next(place for place, stmt in enumerate(rest) if isinstance(stmt, Region))
    known: dict[object, Around] = {}
    found: list[Around] = []
    for own in rank_programs(program):
        kind = (own.dims, own.buckets)
        if kind not in known:
            account = _Account(own, program.types)
            before, after = (
                evolve(program.region, body=tuple(body)) for body in (rest[:row], rest[row + 1 :])
            )
            known[kind] = (
                [*account.within(before, (), "step")],
                [*account.within(after, (), "step")],
            )
        found.append(known[kind])
    return found


@once
def _chunk_account(program: Program) -> "_Account":
    """The account in which the moves of all chunks are looked up."""
    return _Account(program, program.types)


@once
def _chunk_ops(program: Program) -> list[Op]:
    """The gathers and reductions of chunks."""
    account = _chunk_account(program)
    return [op for op in chunk_moves(program) if account.messages(op)]


class ChunkMoves:
    """The gathers and reductions of a rank's chunks, which the IR has of all stages at once, as
    `ops`.
    """

    def __init__(self, program: Program, pipeline: Pipeline, rank: int) -> None:
        assert pipeline.schedule, "account: a pipeline without rows"
        self._program, self._rank, self._spans = program, rank, pipeline.schedule.spans[rank]
        self._chunks = chunks(program)[rank]
        self._account = _chunk_account(program)
        self.ops = _chunk_ops(program)

    def gathers(self) -> Iterator[tuple[Chunk, Op]]:
        """In the order in which stages begin; buckets that the step gathers over the same axes
        go together.
        """
        gathers = [op for op in self.ops if not self._account.reduces(op)]
        for _, run in groupby(gathers, key=self._account.axes):
            yield from sorted(self._pairs(run), key=lambda pair: pair[0].stages)

    def reductions(self) -> Iterator[tuple[Chunk, Op]]:
        """In the order in which stages end."""
        sums = filter(self._account.reduces, self.ops)
        yield from sorted(
            self._pairs(sums), key=lambda pair: needed(self._spans, pair[0].stages).stop
        )

    def messages(self, chunk: Chunk, op: Op) -> tuple[Message, ...]:
        """Messages of an op on a chunk."""
        return messages(with_chunks(self._program, [chunk]), op, self._account.types)

    def collectives(self, moved: Iterable[tuple[Chunk, Op]]) -> Iterator[Collective]:
        """The entries of moves."""
        for chunk, op in moved:
            for each in self.messages(chunk, op):
                yield evolve(
                    self._account.entry(op, each, (), "step"), rank=self._rank, chunk=chunk.stages
                )

    def _pairs(self, ops: Iterable[Op]) -> Iterator[tuple[Chunk, Op]]:
        """Each op with the chunks of its bucket."""
        return (
            (chunk, op)
            for op in ops
            for chunk in self._chunks
            if chunk.bucket == self._account.bucket(op)
        )


def _messages(program: Program, pipeline: Pipeline, stage: int) -> Iterator[Collective]:
    """The messages of a stage, each value that crosses by itself."""
    from ..schedules.cell_table import cell_table

    assert pipeline.schedule, "account: a pipeline without rows"
    rank, axis = pipeline.stage_to_rank[stage], pipeline.axis
    counts = cell_table(pipeline.schedule).counts
    cuts = crossing(program, pipeline)
    for work, (op, where) in MESSAGES.items():
        peer = Action(stage, work, 0).peer
        crosses = cuts[min(stage, peer)] if counts[stage, work] else ()
        for value in (
            value for value in crosses if where == "forward" or value.type.differentiable
        ):
            yield Collective(
                use="stages",
                bucket="",
                op=op,
                maximum=False,
                axes=(axis,),
                ranks=program.degree((axis,)),
                dtype=value.type.dtype,
                shape=program.local_shape(value.type),
                loops=(MICROBATCHES,),
                last=False,
                ahead=0,
                every=1,
                count=counts[stage, work],
                where=where,
                value=value.name,
                line=str(program.axis(axis).span),
                rank=rank,
                stage=stage,
                peer=pipeline.stage_to_rank[peer],
            )


MESSAGES: dict[Work, tuple[str, Where]] = {
    Work.RECEIVE_FORWARD: ("receive", "forward"),
    Work.SEND_FORWARD: ("send", "forward"),
    Work.RECEIVE_BACKWARD: ("receive", "backward"),
    Work.SEND_BACKWARD: ("send", "backward"),
}
"""The op of a message, and the block it is in."""


class _Account:
    """The collectives of a program, or of one of its stages, which has these layers."""

    def __init__(
        self, program: Program, types: Mapping[str, Type], layers: Mapping[str, range] | None = None
    ) -> None:
        self._program, self.types, self._own_layers = program, types, layers or {}
        self._loops = Names()
        self._messages: dict[int, tuple[Op, tuple[Message, ...]]] = {}
        self._begun = self._reductions()
        self._elsewhere = {op.outputs[0].name for ops in self._begun.values() for op in ops}

    def within(self, region: Region, loops: tuple[str, ...], where: Where) -> Iterator[Collective]:
        """The collectives of a region whose body runs inside `loops`."""
        here = filter(self._stands, region.body)
        for (layers, _), stmts in groupby(here, self._together):
            inside = (*loops, *map(self._loops.fresh, layers))
            for stmt in stmts:
                yield from self._of(stmt, inside, where)

    def _of(self, stmt: Stmt, loops: tuple[str, ...], where: Where) -> Iterator[Collective]:
        if isinstance(stmt, Region):
            inside = (*loops, self._loops.fresh(stmt.dim)) if stmt.dim else loops
            yield from self.within(stmt, inside, _BLOCKS.get(stmt.kind, where))
        elif stmt.kind == "begin":
            for op in self._begun[str(stmt.get("bucket"))]:
                yield from self.collectives(op, loops, where, last=True)
        else:
            yield from self.collectives(stmt, loops, where)

    def _reductions(self) -> dict[str, list[Op]]:
        """By bucket the ops, at the scope of the step, that reduce a gradient; their reduction
        begins in each layer.
        """
        body = self._program.region.body
        found: dict[str, list[Op]] = {
            str(op.get("bucket")): [] for op in walk(body) if op.kind == "begin"
        }
        for op in body:
            if isinstance(op, Op) and self.reduces(op):
                found.get(self.bucket(op), []).append(op)
        return found

    def _stands(self, stmt: Stmt) -> bool:
        """Whether something begins in a region, or at an op."""
        if isinstance(stmt, Region) or stmt.kind == "begin":
            return True
        return bool(self.messages(stmt)) and stmt.outputs[0].name not in self._elsewhere

    def _together(self, stmt: Stmt) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The stacks that an op gathers layer by layer, and its axes: neighbours that share
        both go together.
        """
        if isinstance(stmt, Region) or stmt.kind == "begin" or not (layers := self._layers(stmt)):
            return (), ()
        return layers, self.axes(stmt)

    def messages(self, op: Op) -> tuple[Message, ...]:
        """The messages that an op sends each time that a rank does it."""
        # of the op itself: comparing ops takes as long as asking for their messages
        if id(op) not in self._messages:
            self._messages[id(op)] = op, messages(self._program, op, self.types)
        return self._messages[id(op)][1]

    def reduces(self, op: Op) -> bool:
        """Whether an op adds up what ranks hold."""
        return any(
            each.op in ("all_reduce", "reduce_scatter") and not each.maximum
            for each in self.messages(op)
        )

    def axes(self, op: Op) -> tuple[str, ...]:
        """All axes over which an op communicates."""
        return tuple(axis for each in self.messages(op) for axis in each.axes)

    def collectives(
        self, op: Op, loops: tuple[str, ...], where: Where, *, last: bool = False
    ) -> Iterator[Collective]:
        """An op's entries; neighbours of the same hops share a loop."""
        for hops, run in groupby(self.messages(op), key=lambda each: each.hops):
            own = self._loops.fresh("hops") if hops else ""
            yield from (
                evolve(self.entry(op, each, loops, where, last=last), hops=own) for each in run
            )

    def entry(
        self, op: Op, it: Message, loops: tuple[str, ...], where: Where, *, last: bool = False
    ) -> Collective:
        """The entry of one message of an op."""
        use = self._use(op, it, where)
        turning = [
            self._program.size(base(loop)) for loop in loops if not (last and loop == MICROBATCHES)
        ]
        every = int(str(dict(op.attrs).get("every", 1)))
        count = (
            prod(turning)
            if every == 1
            else prod(turning[:-1]) * self._recomputed_layers(loops[-1], every)
        )
        return Collective(
            use=use,
            bucket=self.bucket(op),
            op=it.op,
            maximum=it.maximum,
            axes=it.axes,
            ranks=len(it.among) or self._program.degree(it.axes),
            dtype=it.dtype,
            shape=it.shape[len(self._layers(op)) :],
            loops=loops,
            last=last,
            ahead=self._program.flow.prefetch if use == "parameters" and where != "step" else 0,
            every=every,
            count=count * (it.hops or 1),
            where=where,
            value=it.what,
            line=str(op.span),
            among=it.among,
            times=it.hops,
            by=it.by,
            ragged=it.ragged,
        )

    def _recomputed_layers(self, loop: str, every: int) -> int:
        """The number of layers of a loop that are the first of `every` layers, counted over all
        stages.
        """
        first = self._own_layers.get(base(loop), range(0)).start
        return -(-(first + self._program.size(base(loop))) // every) - -(-first // every)

    def _use(self, op: Op, it: Message, where: Where) -> Use:
        if self.bucket(op):
            return "parameters" if it.op == "all_gather" else "gradients"
        return "totals" if where == "step" else "activations"

    def _layers(self, op: Op) -> tuple[str, ...]:
        """The dims of the layers whose flat buffers an op takes as one stack, and communicates
        one by one.
        """
        return self.types[op.inputs[0]].dims[:-1] if self.bucket(op) else ()

    def bucket(self, op: Op) -> str:
        """The bucket whose flat buffer an op takes, "" for none."""
        bucket = self._program.bucket_of(self.types[op.inputs[0]])
        return bucket.name if bucket else ""


_BLOCKS: dict[str, Where] = {"forward": "forward", "backward": "backward"}
