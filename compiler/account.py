"""What a program's step communicates and how many parameters it has, read off the IR.

Purpose: one list of collectives, for the user, for `plan.json` and for the test that holds a recorded run against it.
Of a pipeline there is one for each rank of its axis, with the messages to other stages.
Non-goals: time and memory; in which order a pipeline's rank does what its stages do (its row says so).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from math import prod
from typing import Literal

from attrs import evolve, frozen

from .ir import ITEM_BYTES, MICROBATCHES, Kind, Names, Op, Pipeline, Program, Region, Stmt, base, types, walk
from .placements import coercion_of, ends
from .portions import of_rank, of_stage
from .schedules.actions import Work
from .stages import crossing, has, stages

Where = Literal["forward", "backward", "step"]
Use = Literal["parameters", "gradients", "activations", "stages", "totals"]


@frozen
class Collective:
    """A collective of the step as one rank sees it; it is done `count` times in a step, once for each turn of `loops`.

    It stands where it begins, which may be before the place where its result is awaited.  A message is one too, of two
    ranks, of which one sends and one receives.

    use      what it is for; `totals` are the count of labels, the loss and the norm, `stages` what crosses their cuts
    bucket   whose flat buffer it moves; "" for none
    op       all_reduce, all_gather, reduce_scatter or all_to_all; send or receive
    maximum  whether an all_reduce takes the maximum, not the sum
    axes     the mesh axes of the group of `ranks` ranks
    shape    of the local tensor that goes in
    loops    the loops around it, outermost first, by their dims: `layers` is the step's first loop over layers,
             `layers.1` its second, so that the whole sequence of calls can be written out from the list
    last     whether it is done in the last microbatch alone
    ahead    how many turns ahead it begins, of all loops but that over microbatches: 1 + ahead of them in the first
             turn, then one in each turn, until all have begun
    every    of how many turns of its innermost loop, counted from forward's first, it is done in the first alone
    value    the name of what comes out
    line     the plan's line that asks for it, as `name.scale:7`
    rank     along the pipeline's axis, of the ranks that do it; None without a pipeline
    stage    which does it in each of its actions `where`; None at the scope of the step
    peer     the rank along the pipeline's axis at a message's other end
    among    the ranks of the axis that take part, if not all do
    """

    use: Use
    bucket: str
    op: str
    maximum: bool
    axes: tuple[str, ...]
    ranks: int
    dtype: str
    shape: tuple[int, ...]
    loops: tuple[str, ...]
    last: bool
    ahead: int
    every: int
    count: int
    where: Where
    value: str
    line: str
    rank: int | None = None
    stage: int | None = None
    peer: int | None = None
    among: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """The number of elements that go in."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in bytes of what goes in."""
        return self.elements * ITEM_BYTES[self.dtype]


def collectives(program: Program, rank: int = 0) -> tuple[Collective, ...]:
    """Everything that a rank communicates in one step, in the order in which it begins; messages behind their stage's.

    `program` has been differentiated.  `rank` is that along the pipeline's axis, if there is one.
    """
    assert program.region.kind == "step", f"account: a program after {program.stage} has no step"
    if not program.pipeline:
        return tuple(_Account(program).within(program.region, (), "step"))
    return tuple(_of_rank(program, program.pipeline, rank))


def evaluation(program: Program, rank: int = 0) -> tuple[Collective, ...]:
    """What `eval_step` communicates: the forward of the same step, and the sums of count and loss."""
    sums = {base(program.region.yields[0].name), base(program.region.yields[2].name)}
    before = {"all_gather"}  # of parameters
    return tuple(
        c
        for c in collectives(program, rank)
        if c.where == "forward" or (c.where == "step" and (base(c.value) in sums or c.op in before))
    )


def places(program: Program) -> range:
    """The ranks along the pipeline's axis, or the one that stands for all."""
    return range(program.axis(program.pipeline.axis).size if program.pipeline else 1)


def parameter_count(program: Program) -> int:
    """The number of parameters of the model, over all ranks, padding left out."""
    return sum(prod(program.valid(dim) for dim in param.type.dims) for param in program.params)


def _of_rank(program: Program, pipeline: Pipeline, rank: int) -> Iterator[Collective]:
    """What a rank of a pipeline does before its row, for each of its stages, and behind its row."""
    account = _Account(of_rank(program, rank))
    for is_row, body in groupby(program.region.body, lambda stmt: isinstance(stmt, Region)):
        if is_row:
            yield from chain.from_iterable(_of_stage(program, pipeline, stage) for stage in has(pipeline, rank))
        else:
            found = account.within(evolve(program.region, body=tuple(body)), (), "step")
            yield from (evolve(each, rank=rank) for each in found if not each.among or rank in each.among)


def _of_stage(program: Program, pipeline: Pipeline, stage: int) -> Iterator[Collective]:
    """What a stage does in its actions, and its messages."""
    first = [turns.start for turns in stages(program, pipeline)[stage].turns]
    own = of_stage(program, stage)
    (region,) = (stmt for stmt in own.region.body if isinstance(stmt, Region))
    account = _Account(own, program, dict(zip(pipeline.dims, first, strict=True)))
    found = account.within(region, (region.dim,), "step")
    yield from (evolve(each, rank=pipeline.homes[stage], stage=stage) for each in found)
    yield from _messages(program, pipeline, stage)


def _messages(program: Program, pipeline: Pipeline, stage: int) -> Iterator[Collective]:
    """The messages of a stage, each value that crosses by itself."""
    assert pipeline.schedule, "account: a pipeline without rows"
    rank, axis = pipeline.homes[stage], pipeline.axis
    works = Counter(action.work for action in pipeline.schedule.rows[rank] if action.stage == stage)
    behind_stage = crossing(program, pipeline)
    for work, (op, where, ahead) in _MESSAGES.items():
        for value in behind_stage[min(stage, stage + ahead)] if works[work] else ():
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
                count=works[work],
                where=where,
                value=value.name,
                line=str(program.axis(axis).span),
                rank=rank,
                stage=stage,
                peer=pipeline.homes[stage + ahead],
            )


_MESSAGES: dict[Work, tuple[str, Where, int]] = {
    Work.RECEIVE_FORWARD: ("receive", "forward", -1),
    Work.SEND_FORWARD: ("send", "forward", 1),
    Work.RECEIVE_BACKWARD: ("receive", "backward", 1),
    Work.SEND_BACKWARD: ("send", "backward", -1),
}
"""What a message is in the account, and how many stages ahead its other end is."""


class _Account:
    """Of a program, or of a stage of it, whose turns of repeats begin with the `first`, and which may be given values
    of the `whole` program.
    """

    def __init__(self, program: Program, whole: Program | None = None, first: Mapping[str, int] | None = None) -> None:
        self._program, self._first = program, first or {}
        self._types = types(whole or program)
        self._loops = Names()
        self._flats = {bucket.dim: bucket.name for bucket in program.buckets}
        self._begun = self._reductions()
        self._elsewhere = {op.outputs[0].name for ops in self._begun.values() for op in ops}

    def within(self, region: Region, loops: tuple[str, ...], where: Where) -> Iterator[Collective]:
        """The collectives of a region whose body runs inside `loops`."""
        here = filter(self._stands, region.body)
        for (turns, _), stmts in groupby(here, self._together):
            inside = (*loops, *map(self._loops.fresh, turns))
            for stmt in stmts:
                yield from self._of(stmt, inside, where)

    def _of(self, stmt: Stmt, loops: tuple[str, ...], where: Where) -> Iterator[Collective]:
        if isinstance(stmt, Region):
            inside = (*loops, self._loops.fresh(stmt.dim)) if stmt.dim else loops
            yield from self.within(stmt, inside, _BLOCKS.get(stmt.kind, where))
        elif stmt.kind == "begin":
            yield from (self._collective(op, loops, where, last=True) for op in self._begun[str(stmt.get("bucket"))])
        else:
            yield self._collective(stmt, loops, where)

    def _reductions(self) -> dict[str, list[Op]]:
        """By bucket the coercions, at the scope of the step, of a gradient whose reduction begins in each turn."""
        body = self._program.region.body
        found: dict[str, list[Op]] = {str(op.get("bucket")): [] for op in walk(body) if op.kind == "begin"}
        for op in body:
            if isinstance(op, Op) and op.kind == "coerce" and ends(op)[0].kind is Kind.PARTIAL:
                found.get(self._bucket(op), []).append(op)
        return found

    def _stands(self, stmt: Stmt) -> bool:
        """Whether something begins in a region, or where an op stands."""
        if isinstance(stmt, Region) or stmt.kind == "begin":
            return True
        moves = stmt.kind == "coerce" and coercion_of(stmt).collective
        return bool(moves) and stmt.outputs[0].name not in self._elsewhere

    def _together(self, stmt: Stmt) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What neighbours share that go turn by turn together: the turns of the stacks that they gather, and axes."""
        if isinstance(stmt, Region) or stmt.kind == "begin" or not (turns := self._turns(stmt)):
            return (), ()
        return turns, stmt.names("axes")

    def _collective(self, op: Op, loops: tuple[str, ...], where: Where, *, last: bool = False) -> Collective:
        axes, source, use = op.names("axes"), self._types[op.inputs[0]], self._use(op, where)
        turning = [self._program.size(base(loop)) for loop in loops if not (last and loop == MICROBATCHES)]
        every, among = int(str(dict(op.attrs).get("every", 1))), tuple(map(int, op.names("among")))
        return Collective(
            use=use,
            bucket=self._bucket(op),
            op=coercion_of(op).collective,
            maximum=ends(op)[0].kind is Kind.MAXIMUM,
            axes=axes,
            ranks=len(among) or self._program.degree(axes),
            dtype=source.dtype,
            shape=self._program.local_shape(source)[len(self._turns(op)) :],
            loops=loops,
            last=last,
            ahead=self._program.flow.prefetch if use == "parameters" and where != "step" else 0,
            every=every,
            count=prod(turning) if every == 1 else prod(turning[:-1]) * self._again(loops[-1], every),
            where=where,
            value=op.outputs[0].name,
            line=str(op.span),
            among=among,
        )

    def _again(self, loop: str, every: int) -> int:
        """In how many turns that is done which is done in the first of every so many, counted over all stages."""
        first = self._first.get(base(loop), 0)
        return -(-(first + self._program.size(base(loop))) // every) - -(-first // every)

    def _use(self, op: Op, where: Where) -> Use:
        if self._bucket(op):
            return "parameters" if ends(op)[0].kind is Kind.SHARDED else "gradients"
        return "totals" if where == "step" else "activations"

    def _turns(self, op: Op) -> tuple[str, ...]:
        """The dims of the turns whose flat buffers a coercion takes as one stack."""
        return self._types[op.inputs[0]].dims[:-1] if self._bucket(op) else ()

    def _bucket(self, op: Op) -> str:
        """Whose flat buffer a coercion takes, "" for none."""
        return self._flats.get("".join(self._types[op.inputs[0]].dims[-1:]), "")


_BLOCKS: dict[str, Where] = {"forward": "forward", "backward": "backward"}
