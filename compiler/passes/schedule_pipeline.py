"""Orders the work of a pipeline's stages, and adds up values over its ranks, where each has a
part.

Purpose: rows of actions with their messages; loss, norm and the gradients of parameters that
several ranks hold become sums over the axis.  Before: `fuse_buckets`.  Non-goals: which stages
there are (`partition_stages`).
"""

from attrs import evolve

from ..analysis.stage_schedule import rows, with_schedule
from ..config.settings import ON
from ..config.units import count_words
from ..ir import (
    INVARIANT,
    MICROBATCHES,
    PARTIAL,
    Attr,
    Op,
    Pipeline,
    Program,
    Region,
    Value,
    Yield,
    ops_in,
    rename,
)
from ..ops.builder import OpBuilder
from ..schedules.actions import ScheduleError
from ..syntax.diagnostics import Diagnostic, Note, PlanError, wrong
from ..syntax.source import Span


def schedule_pipeline(program: Program) -> Program:
    """The program with its pipeline's schedule.  Raises PlanError."""
    pipeline = program.pipeline
    if not pipeline:
        return program
    program = sum_over_stages(program, pipeline)
    try:
        pipeline = with_schedule(program, pipeline)
    except ScheduleError as error:
        raise PlanError([impossible(error, program, pipeline)]) from None
    _demand_whole(program, pipeline)
    return evolve(program, pipeline=pipeline)


def sum_over_stages(program: Program, pipeline: Pipeline) -> Program:
    """The program with sums over its stages' ranks."""
    return evolve(program, region=_Sums(program, pipeline).region())


def demand_rows(program: Program, pipeline: Pipeline) -> None:
    """Raises PlanError where a schedule that has a name has no rows for the plan's
    microbatches, or rows that split.
    """
    try:
        schedule = rows(pipeline, program.axis(pipeline.axis).size, program.size(MICROBATCHES))
    except ScheduleError as error:
        raise PlanError([impossible(error, program, pipeline)]) from None
    _demand_whole(program, evolve(pipeline, schedule=schedule))


def _demand_whole(program: Program, pipeline: Pipeline) -> None:
    """Checks that graphs of torch.compile, which have one backward, are not split."""
    if program.train.compile == ON and pipeline.splits:
        message = "backward of a compiled layer cannot delay its weight gradients"
        notes = (Note(program.train.spans["compile"], "layers are compiled"),)
        help = (
            "choose a schedule that does not split backward, `1f1b` or `interleaved_1f1b`, or"
            " leave `compile` out"
        )
        span = pipeline.settings.spans["schedule"]
        raise wrong("E0412", message, span, help=help, notes=notes)


def impossible(error: ScheduleError, program: Program, pipeline: Pipeline) -> Diagnostic:
    """The error for an impossible schedule, at the plan's line."""
    dim = program.dim(MICROBATCHES)
    notes = (
        Note(dim.span, count_words(dim.size, "microbatch")),
        Note(program.axis(pipeline.axis).span, "the ranks"),
    )
    order = pipeline.settings.schedule
    span = order.spans["memory"] if order.memory else pipeline.settings.spans["schedule"]
    return Diagnostic("E0517", error.why, span, "", notes, error.help)


CHAIN = ("coerce", "cast", "pack")
"""The ops through which a pending sum passes on its way to its use."""


class _Sums(OpBuilder):
    """Rewrites the step; `pending` has values that are sums over the stages' ranks, and the
    ranks that hold them.
    """

    def __init__(self, program: Program, pipeline: Pipeline) -> None:
        super().__init__(program)
        self._pipeline = pipeline
        self._pending: dict[str, tuple[int, ...]] = {}  # no ranks where each has a part of its own
        self._same: dict[str, str] = {}  # what is summed → its sum
        self._once: dict[str, tuple[int, ...]] = {}  # sums that several ranks hold
        self._passed_on = set[str]()
        for op in ops_in(program.region.body):
            if op.kind in CHAIN:
                self._passed_on.update(op.inputs)
        # sums of gradients, after all that stages do by themselves
        self._later: list[tuple[str, Op]] = []

    def region(self) -> Region:
        region = self.program.region
        for stmt in region.body:
            if isinstance(stmt, Region):
                self.body.append(self._microbatches(stmt))
            else:
                self._op(rename(stmt, self._same))
        for end in region.yields:
            if end.name in self._pending and end.name not in self._same:
                self._reduce(end.name, region.span)
        yields = list[Yield]()
        for end in region.yields:
            yields.append(evolve(end, name=self._same.get(end.name, end.name)))
        return evolve(region, body=tuple(self.body), yields=tuple(yields))
        return evolve(region, body=tuple(self.body), yields=yields)

    def _microbatches(self, region: Region) -> Region:
        """Each rank has what its own stages make, and its part of a gradient that several ranks
        hold.
        """
        sums, gradients = (
            region.results[: self.program.microbatch_results],
            region.results[self.program.microbatch_results :],
        )
        ranks_of_gradients = dict[str, tuple[int, ...]]()
        for op in ops_in(self.program.region.body):
            if op.kind == "pack":
                params = self.program.bucket(str(op.get("bucket"))).params
                for name, param in zip(op.inputs, params, strict=True):
                    ranks_of_gradients[name] = self._pipeline.ranks_of(param)
        self._pending = {value.name: () for value in sums}
        for value in gradients:
            ranks = ranks_of_gradients.get(value.name, ())
            if len(ranks) > 1:
                self._pending[value.name] = ranks
        return evolve(region, results=tuple(map(self._mark_partial, region.results)))

    def _op(self, op: Op) -> None:
        holders = {self._pending[name] for name in op.inputs if name in self._pending}
        if op.kind == "sum_squares":
            self._squares(op)
        elif not holders:
            self.body.append(op)
        elif op.kind == "coerce" and holders == {()}:
            self.body.append(self._wider(op))
        elif op.kind in CHAIN:
            self._pass_on(op, *holders)
        else:
            (name,) = (name for name in op.inputs if name in self._pending)
            self._reduce(name, op.span)
            self.body.append(rename(op, self._same))

    def _wider(self, op: Op) -> Op:
        """A reduction that sums over the stages' ranks too."""
        axes = {*op.names("axes"), self._pipeline.axis}
        ordered = tuple(axis.name for axis in self.program.axes if axis.name in axes)
        attrs = list[tuple[str, Attr]]()
        for key, value in op.attrs:
            attrs.append((key, ordered if key == "axes" else value))
        return evolve(op, attrs=tuple(attrs))

    def _pass_on(self, op: Op, ranks: tuple[int, ...]) -> None:
        """A result of a part is a part; the last one is summed."""
        (value,) = op.outputs
        self._pending[value.name] = ranks
        self.body.append(evolve(op, outputs=(self._mark_partial(value),)))
        if value.name not in self._passed_on:
            self._later.append((value.name, op))

    def _squares(self, op: Op) -> None:
        """Each rank's part; what several ranks hold is counted by the first."""
        for name, part in self._later:
            self._reduce(name, part.span)
            self._once[self._same[name]] = self._pending[name]
        self._later.clear()
        op = rename(op, self._same)
        ranks = next((self._once[name] for name in op.inputs if name in self._once), ())
        once = (("once", tuple(map(str, ranks))),) if ranks else ()
        attrs: tuple[tuple[str, Attr], ...] = (("stages", self._pipeline.axis), *once)
        (squares,) = op.outputs
        self._pending[squares.name] = ()
        self.body.append(evolve(op, outputs=(self._mark_partial(squares),), attrs=attrs))
        if squares.name not in self._passed_on:
            self._reduce(squares.name, op.span)

    def _reduce(self, name: str, span: Span) -> None:
        """Appends the sum of a value over the ranks that hold it, or all."""
        ranks = self._pending[name]
        value = self.value(name, self.types[name])
        some = len(ranks) < self.program.axis(self._pipeline.axis).size
        among = (("among", tuple(map(str, ranks))),) if ranks and some else ()
        attrs: tuple[tuple[str, Attr], ...] = (("from", PARTIAL), ("to", INVARIANT), *among)
        self.body.append(
            Op("coerce", (name,), (value,), (("axes", (self._pipeline.axis,)), *attrs), span=span)
        )
        self._same[name] = value.name

    def _mark_partial(self, value: Value) -> Value:
        if value.name not in self._pending:
            return value
        places = dict(value.type.places) | {self._pipeline.axis: PARTIAL}
        return evolve(value, type=evolve(value.type, places=self.program.places(places)))
