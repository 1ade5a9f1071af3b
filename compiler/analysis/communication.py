"""The communication of a program's step and the number of its parameters, read off the IR.

Purpose: one list of collectives, for the user, for `plan.json` and for the test that compares a
recorded run with it.  With a pipeline there is one list per rank of its axis, with the messages to
other stages.  Non-goals: time and memory; the order of a pipeline rank's actions (its row has it).
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
    """Everything that a rank communicates in one step, in the order that it begins in; a stage's
    messages come after its collectives.

    `program` has been differentiated.  `rank` counts along the pipeline's axis, if there is one.
    """
    assert program.region.kind == "step", f"account: a program after {program.after} has no step"
    if program.pipeline:
        return _entries_by_rank(program)[rank]
    entries = _Account(program, program.types).entries_of_region(program.region, (), "step")
    return tuple(entry for entry in entries if entry.ranks > 1)


def evaluation(program: Program, rank: int = 0) -> tuple[Collective, ...]:
    """The communication of `eval_step`: the forward of the same step, and the sums of count and
    loss.
    """
    sums = {base(program.region.yields[0].name), base(program.region.yields[2].name)}
    before = {"all_gather"}  # of parameters
    entries = list[Collective]()
    for collective in collectives(program, rank):
        is_wanted = collective.where == "forward"
        if collective.where == "step":
            is_wanted = base(collective.value) in sums or collective.op in before
        if is_wanted:
            entries.append(collective)
    return tuple(entries)


def places(program: Program) -> range:
    """The ranks along the pipeline's axis, or 0 for all ranks."""
    if program.pipeline:
        return range(program.axis(program.pipeline.axis).size)
    return range(1)


def parameter_count(program: Program) -> int:
    """The number of parameters of the model, over all ranks, padding left out."""
    return sum(prod(map(program.valid, param.type.dims)) for param in program.params)


def active_count(program: Program) -> int:
    """The number of parameters that compute for a token: of experts, the ones that it chose."""
    chosen = {dim.name: program.dim(dim.chosen or dim.name) for dim in program.dims}
    count = 0
    for param in program.params:
        count += prod(chosen[dim].valid for dim in param.type.dims)
    return count


@once
def _entries_by_rank(program: Program) -> tuple[tuple[Collective, ...], ...]:
    assert program.pipeline, "account: no pipeline"
    of_stages, of_steps = _entries_by_stage(program), _entries_around_rows(program)
    entries_by_rank = list[tuple[Collective, ...]]()
    for rank in places(program):
        entries = _entries_of_rank(program, program.pipeline, rank, of_stages, of_steps[rank])
        entries_by_rank.append(tuple(entries))
    return tuple(entries_by_rank)


Around = tuple[list[Collective], list[Collective]]
"""The collectives before a rank's row, and after it."""


def _entries_of_rank(
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
    yield from _step_entries_of_rank(before, rank)
    yield from moves.collectives(moves.gathers())
    for number in pipeline.stages_of(rank):
        for entry in of_stages[number]:
            yield evolve(entry, rank=rank, stage=number)
        yield from _messages(program, pipeline, number)
    yield from moves.collectives(moves.reductions())
    yield from _step_entries_of_rank(after, rank)


def _step_entries_of_rank(entries: Iterable[Collective], rank: int) -> Iterator[Collective]:
    """The entries of the step that a rank takes part in."""
    for entry in entries:
        if not entry.among or rank in entry.among:
            yield evolve(entry, rank=rank)


def _entries_by_stage(program: Program) -> list[list[Collective]]:
    """The collectives of each stage in its actions; stages that do the same are read once."""
    entries_by_kind: dict[object, list[Collective]] = {}
    entries_by_stage: list[list[Collective]] = []
    for stage in stage_programs(program):
        if stage.kind not in entries_by_kind:
            microbatches = stage.program.microbatches
            account = _Account(stage.program, program.types, stage.layers)
            entries = account.entries_of_region(microbatches, (microbatches.dim,), "step")
            entries_by_kind[stage.kind] = [*entries]
        entries_by_stage.append(entries_by_kind[stage.kind])
    return entries_by_stage


def _entries_around_rows(program: Program) -> list[Around]:
    """The collectives of each rank around its row; ranks whose buckets are as large are read
    once.
    """
    chunk_ops = _chunk_ops(program)
    stmts = [stmt for stmt in program.region.body if stmt not in chunk_ops]
    row = next(place for place, stmt in enumerate(stmts) if isinstance(stmt, Region))
    before_row = evolve(program.region, body=tuple(stmts[:row]))
    after_row = evolve(program.region, body=tuple(stmts[row + 1 :]))
    around_by_kind: dict[object, Around] = {}
    around_by_rank: list[Around] = []
    for rank_program in rank_programs(program):
        kind = (rank_program.dims, rank_program.buckets)
        if kind not in around_by_kind:
            account = _Account(rank_program, program.types)
            around_by_kind[kind] = (
                [*account.entries_of_region(before_row, (), "step")],
                [*account.entries_of_region(after_row, (), "step")],
            )
        around_by_rank.append(around_by_kind[kind])
    return around_by_rank


@once
def _chunk_account(program: Program) -> "_Account":
    """The account that knows the moves of all chunks."""
    return _Account(program, program.types)


@once
def _chunk_ops(program: Program) -> list[Op]:
    """The gathers and reductions of chunks."""
    account = _chunk_account(program)
    return [op for op in chunk_moves(program) if account.messages(op)]


class ChunkMoves:
    """The gathers and reductions of a rank's chunks.

    The IR has them for all stages at once, as `ops`.
    """

    def __init__(self, program: Program, pipeline: Pipeline, rank: int) -> None:
        assert pipeline.schedule, "account: a pipeline without rows"
        self._program, self._rank, self._spans = program, rank, pipeline.schedule.spans[rank]
        self._chunks = chunks(program)[rank]
        self._account = _chunk_account(program)
        self.ops = _chunk_ops(program)

    def gathers(self) -> Iterator[tuple[Chunk, Op]]:
        """Chunks with the ops that gather them, in the order that stages begin in; buckets that
        the step gathers over the same axes go together.
        """
        gathers = [op for op in self.ops if not self._account.reduces(op)]
        for _, run in groupby(gathers, key=self._account.axes):
            yield from sorted(self._pairs(run), key=lambda pair: pair[0].stages)

    def reductions(self) -> Iterator[tuple[Chunk, Op]]:
        """Chunks with the ops that reduce them, in the order that stages end in."""
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
            for message in self.messages(chunk, op):
                entry = self._account.entry(op, message, (), "step")
                yield evolve(entry, rank=self._rank, chunk=chunk.stages)

    def _pairs(self, ops: Iterable[Op]) -> Iterator[tuple[Chunk, Op]]:
        """Each op with the chunks of its bucket."""
        for op in ops:
            for chunk in self._chunks:
                if chunk.bucket == self._account.bucket(op):
                    yield chunk, op


def _messages(program: Program, pipeline: Pipeline, stage: int) -> Iterator[Collective]:
    """The messages of a stage, one for each value that crosses a cut."""
    from ..schedules.cell_table import cell_table

    assert pipeline.schedule, "account: a pipeline without rows"
    rank, axis = pipeline.stage_to_rank[stage], pipeline.axis
    counts = cell_table(pipeline.schedule).counts
    cuts = crossing(program, pipeline)
    for work, (op, where) in MESSAGES.items():
        if not counts[stage, work]:
            continue
        peer = Action(stage, work, 0).peer
        for value in cuts[min(stage, peer)]:
            if where == "backward" and not value.type.differentiable:
                continue  # it has no gradient to send back
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
    """The collectives of a program, or of one of its stages; `layers` are the stage's own."""

    def __init__(
        self, program: Program, types: Mapping[str, Type], layers: Mapping[str, range] | None = None
    ) -> None:
        self._program, self.types = program, types
        self._own_layers = layers or {}
        self._loops = Names()
        self._messages: dict[int, tuple[Op, tuple[Message, ...]]] = {}
        self._begun = self._reductions()
        self._elsewhere = {op.outputs[0].name for ops in self._begun.values() for op in ops}

    def entries_of_region(
        self, region: Region, loops: tuple[str, ...], where: Where
    ) -> Iterator[Collective]:
        """The collectives of a region whose body runs inside `loops`."""
        here = filter(self._is_entry_point, region.body)
        for (layers, _), stmts in groupby(here, self._grouping_key):
            inside = (*loops, *map(self._loops.fresh, layers))
            for stmt in stmts:
                yield from self._entries_of_stmt(stmt, inside, where)

    def _entries_of_stmt(
        self, stmt: Stmt, loops: tuple[str, ...], where: Where
    ) -> Iterator[Collective]:
        if isinstance(stmt, Region):
            inside = loops
            if stmt.dim:
                inside = (*loops, self._loops.fresh(stmt.dim))
            yield from self.entries_of_region(stmt, inside, _BLOCKS.get(stmt.kind, where))
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
        ops_by_bucket: dict[str, list[Op]] = {}
        for op in walk(body):
            if op.kind == "begin":
                ops_by_bucket[str(op.get("bucket"))] = []
        for op in body:
            if isinstance(op, Op) and self.reduces(op):
                ops_by_bucket.get(self.bucket(op), []).append(op)
        return ops_by_bucket

    def _is_entry_point(self, stmt: Stmt) -> bool:
        """Whether a collective begins in a region, or at an op."""
        if isinstance(stmt, Region) or stmt.kind == "begin":
            return True
        return bool(self.messages(stmt)) and stmt.outputs[0].name not in self._elsewhere

    def _grouping_key(self, stmt: Stmt) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The stacks that an op gathers layer by layer, and its axes.

        Neighbours that share stacks and axes go together.
        """
        if isinstance(stmt, Region) or stmt.kind == "begin":
            return (), ()
        layers = self._layers(stmt)
        if not layers:
            return (), ()
        return layers, self.axes(stmt)

    def messages(self, op: Op) -> tuple[Message, ...]:
        """The messages that an op sends each time that a rank does it."""
        # by the op's identity: comparing ops takes as long as asking for their messages
        if id(op) not in self._messages:
            self._messages[id(op)] = op, messages(self._program, op, self.types)
        return self._messages[id(op)][1]

    def reduces(self, op: Op) -> bool:
        """Whether an op adds up what ranks hold."""
        for message in self.messages(op):
            if message.op in ("all_reduce", "reduce_scatter") and not message.maximum:
                return True
        return False

    def axes(self, op: Op) -> tuple[str, ...]:
        """All axes that an op communicates over."""
        axes = list[str]()
        for message in self.messages(op):
            axes += message.axes
        return tuple(axes)

    def collectives(
        self, op: Op, loops: tuple[str, ...], where: Where, *, last: bool = False
    ) -> Iterator[Collective]:
        """An op's entries; neighbours of the same hops share a loop."""
        for hops, run in groupby(self.messages(op), key=lambda message: message.hops):
            hops_loop = ""
            if hops:
                hops_loop = self._loops.fresh("hops")
            for message in run:
                yield evolve(self.entry(op, message, loops, where, last=last), hops=hops_loop)

    def entry(
        self,
        op: Op,
        message: Message,
        loops: tuple[str, ...],
        where: Where,
        *,
        last: bool = False,
    ) -> Collective:
        """The entry of one message of an op."""
        use = self._use(op, message, where)
        ahead = 0
        if use == "parameters" and where != "step":
            ahead = self._program.flow.prefetch
        every = int(str(dict(op.attrs).get("every", 1)))
        return Collective(
            use=use,
            bucket=self.bucket(op),
            op=message.op,
            maximum=message.maximum,
            axes=message.axes,
            ranks=len(message.among) or self._program.degree(message.axes),
            dtype=message.dtype,
            shape=message.shape[len(self._layers(op)) :],
            loops=loops,
            last=last,
            ahead=ahead,
            every=every,
            count=self._iterations(loops, every, last=last) * (message.hops or 1),
            where=where,
            value=message.what,
            line=str(op.span),
            among=message.among,
            times=message.hops,
            by=message.by,
            ragged=message.ragged,
        )

    def _iterations(self, loops: Sequence[str], every: int, *, last: bool) -> int:
        """How often a step does an op inside `loops`; `last`: in the last microbatch alone."""
        sizes = list[int]()
        for loop in loops:
            if not (last and loop == MICROBATCHES):
                sizes.append(self._program.size(base(loop)))
        if every == 1:
            return prod(sizes)
        return prod(sizes[:-1]) * self._count_recomputed_layers(loops[-1], every)

    def _count_recomputed_layers(self, loop: str, every: int) -> int:
        """The number of layers of a loop that are the first of `every` layers, counted over all
        stages.
        """
        first = self._own_layers.get(base(loop), range(0)).start
        return -(-(first + self._program.size(base(loop))) // every) - -(-first // every)

    def _use(self, op: Op, message: Message, where: Where) -> Use:
        if self.bucket(op):
            return "parameters" if message.op == "all_gather" else "gradients"
        return "totals" if where == "step" else "activations"

    def _layers(self, op: Op) -> tuple[str, ...]:
        """The dims of the layers of an op's stack of flat buffers, which it communicates one by
        one; empty for an op on no bucket.
        """
        if not self.bucket(op):
            return ()
        return self.types[op.inputs[0]].dims[:-1]

    def bucket(self, op: Op) -> str:
        """The bucket whose flat buffer an op takes, "" for none."""
        bucket = self._program.bucket_of(self.types[op.inputs[0]])
        return bucket.name if bucket else ""


_BLOCKS: dict[str, Where] = {"forward": "forward", "backward": "backward"}
