"""Orders the work of a pipeline's stages, and adds up over its ranks what each has a part of.

Purpose: rows of actions with their messages; loss, norm and the gradients of parameters that several ranks hold become
sums over the axis.  Before: `fuse_buckets`.  Non-goals: which stages there are (`cut_stages`).
"""

from attrs import evolve

from ..diagnostics import Diagnostic, PlanError
from ..ir import INVARIANT, MICROBATCHES, PARTIAL, Attr, Names, Op, Pipeline, Program, Region, Stmt, Value, types
from ..schedules.actions import Schedule
from ..schedules.generate import SCHEDULES
from ..schedules.impossible import Impossible
from ..schedules.messages import with_messages
from ..schedules.timeline import Times


def schedule_pipeline(program: Program) -> Program:
    """The program with its pipeline's schedule.  Raises PlanError."""
    if not program.pipeline:
        return program
    pipeline = evolve(program.pipeline, schedule=_schedule(program, program.pipeline))
    return evolve(program, region=_Sums(program, pipeline).region(), pipeline=pipeline)


def _schedule(program: Program, pipeline: Pipeline) -> Schedule:
    order = pipeline.settings.schedule
    try:
        made = SCHEDULES[order.kind](program.axis(pipeline.axis).size, program.size(MICROBATCHES), order.chunks)
    except Impossible as error:
        span = pipeline.settings.spans["schedule"]
        raise PlanError([Diagnostic("E0518", error.why, span, "this schedule cannot be", help=error.help)]) from None
    return with_messages(made, Times.uniform(made.stages))


CHAIN = ("coerce", "cast", "pack")
"""What a pending sum goes through on its way to where it is needed."""


class _Sums:
    """Rewrites the step; `pending` has the values that are sums over the stages' ranks, and those that hold them."""

    def __init__(self, program: Program, pipeline: Pipeline) -> None:
        self._program, self._pipeline = program, pipeline
        self._names = Names(types(program))
        self._pending: dict[str, tuple[int, ...]] = {}  # the ranks that hold it; none where each has a part
        self._same: dict[str, str] = {}
        self._types = types(program)
        self._body: list[Stmt] = []

    def region(self) -> Region:
        region = self._program.region
        for stmt in region.body:
            self._body.append(self._microbatches(stmt) if isinstance(stmt, Region) else self._op(stmt))
        yields = tuple(evolve(end, name=self._same.get(end.name, end.name)) for end in region.yields)
        return evolve(region, body=tuple(self._body), yields=yields)

    def _microbatches(self, region: Region) -> Region:
        loss, *others = region.results
        packed = (op for op in self._program.region.body if isinstance(op, Op) and op.kind == "pack")
        of = {name: p for op in packed for name, p in zip(op.inputs, self._program.bucket(str(op.get("bucket"))).params, strict=True)}
        held = {value.name: self._pipeline.ranks_of(of[value.name]) for value in others if value.name in of}
        self._pending = {loss.name: ()} | {name: ranks for name, ranks in held.items() if len(ranks) > 1}
        return evolve(region, results=tuple(self._marked(value) for value in region.results))

    def _op(self, op: Op) -> Op:
        op = evolve(op, inputs=tuple(self._same.get(name, name) for name in op.inputs))
        if op.kind == "sum_squares":
            return self._squares(op)
        found = {name: self._pending[name] for name in op.inputs if name in self._pending}
        if not found:
            return op
        (ranks,) = {*found.values()}
        if op.kind in CHAIN and not (op.kind == "coerce" and not ranks):
            self._pending |= {value.name: ranks for value in op.outputs}
            return evolve(op, outputs=tuple(map(self._marked, op.outputs)))
        if op.kind == "coerce":
            axes = {*op.names("axes"), self._pipeline.axis}
            ordered = tuple(axis.name for axis in self._program.axes if axis.name in axes)
            return evolve(op, attrs=tuple((key, ordered if key == "axes" else value) for key, value in op.attrs))
        return self._reduced(op)

    def _squares(self, op: Op) -> Op:
        """Each rank's part; what several ranks hold is counted by the first."""
        ranks = next((self._pending[name] for name in op.inputs if name in self._pending), ())
        op = self._reduced(op) if ranks else op
        self._pending |= {value.name: () for value in op.outputs}
        once = (("once", tuple(map(str, ranks))),) if ranks else ()
        attrs: tuple[tuple[str, Attr], ...] = (("stages", self._pipeline.axis), *once)
        return evolve(op, outputs=tuple(map(self._marked, op.outputs)), attrs=attrs)

    def _reduced(self, op: Op) -> Op:
        """The op behind the reductions of what it takes."""
        for name in op.inputs:
            if name not in self._pending:
                continue
            ranks = self._pending.pop(name)
            value = Value(self._names.fresh(name), self._types[name])
            among = (("among", tuple(map(str, ranks))),) if ranks and len(ranks) < self._ranks else ()
            attrs: tuple[tuple[str, Attr], ...] = (
                ("axes", (self._pipeline.axis,)),
                ("from", PARTIAL),
                ("to", INVARIANT),
                *among,
            )
            self._body.append(Op("coerce", (name,), (value,), attrs, span=op.span))
            self._same[name] = value.name
        return evolve(op, inputs=tuple(self._same.get(name, name) for name in op.inputs))

    @property
    def _ranks(self) -> int:
        return self._program.axis(self._pipeline.axis).size

    def _marked(self, value: Value) -> Value:
        if value.name not in self._pending:
            return value
        places = dict(value.type.places) | {self._pipeline.axis: PARTIAL}
        return evolve(value, type=evolve(value.type, places=self._program.places(places)))
