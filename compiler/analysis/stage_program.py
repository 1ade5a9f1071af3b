"""The programs of one pipeline stage, and of one rank with all of its stages.

The IR of a step has all stages together.  Here it is cut at the carries of the repeats that are
split.  A stage's program has the stage's layers and statements; its blocks say what they receive
and send.  Where several stages have terms of a gradient, each stage sums the terms that it has.
Non-goals: when stages work (`schedules`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from attrs import evolve, frozen

from ..ir import Arg, Bucket, Enter, Op, Pipeline, Program, Region, Stmt, Value, once, results
from ..ir.stages import Stage, groups, is_free, layers_of_rank, stages, stages_of_param
from .stage_buckets import chunks, with_chunks

RECEIVED = " received as "
"""Joins the parts of a received value's name: the name of the value on the stage before, and the
name of the layers' argument.
"""
SUMS = ("add", "cast", "coerce")
"""Ops on the terms of a parameter's gradient: linear in each."""


@frozen
class StageBlock:
    """A stage's part of forward or backward.

    inputs   what it receives
    outputs  what it sends
    carried  what its repeats hand on, layer by layer; their other results stay on the stage
    """

    inputs: tuple[Value, ...] = ()
    body: tuple[Stmt, ...] = ()
    outputs: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()

    @property
    def bound_names(self) -> list[str]:
        """The names that its statements bind."""
        return [value.name for stmt in self.body for value in results(stmt)]


@frozen
class StageProgram:
    """One stage's part of a microbatch; `layers` are its iterations of each repeat that is
    split.
    """

    program: Program
    layers: dict[str, range]
    forward: StageBlock
    backward: StageBlock

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for stages of a program that do the same ops in as many layers, and recompute as
        many of them.

        Blocks of stages that do the same statements are one object.
        """
        every = max(self.program.train.recompute.number, 1)
        layers = ((len(numbers), numbers.start % every) for numbers in self.layers.values())
        return (id(self.forward), id(self.backward), *layers)


@once
def stage_programs(program: Program) -> tuple[StageProgram, ...]:
    """The programs of all stages, in the model's order."""
    assert program.pipeline, "stage_programs: no pipeline"
    pipeline, all_stages = program.pipeline, stages(program, program.pipeline)
    forward, backward = _make_blocks(program, pipeline)
    cuts, last = [None, *map(_Cut.before_stage, all_stages[1:]), None], len(pipeline.dims)
    programs: list[StageProgram] = []
    for stage, begin, end in zip(all_stages, cuts, cuts[1:], strict=False):
        ahead = forward.part(stage, begin, end)
        mirrored = Stage(tuple(last - group for group in stage.groups), stage.layers[::-1])
        back = backward.part(
            mirrored, end and end.get_mirror(last), begin and begin.get_mirror(last)
        )
        layers = dict(zip(pipeline.dims, stage.layers, strict=True))
        stage_program = _with_bodies(program, layers, ahead.body, back.body)
        programs.append(StageProgram(stage_program, layers, ahead, back))
    return tuple(programs)


def _make_blocks(program: Program, pipeline: Pipeline) -> tuple["_Block", "_Block"]:
    """Forward and backward of all stages."""
    forward = _Block(pipeline, program.forward.body)
    counts = list[int]()  # of the gradients that cross, cut by cut
    for args in reversed(forward.crossing):
        counts.append(sum(arg.value.type.differentiable for arg in args))
    gradients = {end.name for end in program.microbatches.yields}
    return forward, _Block(pipeline, program.backward.body, counts, gradients)


def _with_bodies(
    program: Program,
    layers: Mapping[str, range],
    forward: tuple[Stmt, ...],
    backward: tuple[Stmt, ...],
) -> Program:
    """The program with these layers, whose microbatches have these bodies."""
    microbatches = program.microbatches
    blocks = evolve(program.forward, body=forward), evolve(program.backward, body=backward)
    body = list[Stmt]()
    for stmt in program.region.body:
        body.append(evolve(stmt, body=blocks) if stmt is microbatches else stmt)
    sized = program.with_sizes({dim: len(numbers) for dim, numbers in layers.items()})
    return evolve(sized, region=evolve(program.region, body=tuple(body)))


@once
def rank_programs(program: Program) -> tuple[Program, ...]:
    """The programs with the parameters, layers and buckets of each rank along the pipeline's axis.

    Their statements are the statements of all stages, so they need not be legal.
    """
    pipeline = program.pipeline
    assert pipeline, "rank_programs: no pipeline"
    ranks_by_param: dict[str, set[int]] = {}
    for param in program.params:
        param_stages = stages_of_param(program, pipeline, param)
        ranks_by_param[param.name] = {pipeline.stage_to_rank[stage] for stage in param_stages}
    programs: list[Program] = []
    for rank, rank_chunks in enumerate(chunks(program)):
        layers = layers_of_rank(program, pipeline, rank)
        sized = program.with_sizes({dim: len(numbers) for dim, numbers in layers.items()})
        params = tuple(param for param in program.params if rank in ranks_by_param[param.name])
        buckets = list[Bucket]()
        for bucket in program.buckets:
            names = tuple(name for name in bucket.params if rank in ranks_by_param[name])
            buckets.append(evolve(bucket, params=names))
        rank_program = with_chunks(sized, rank_chunks)
        programs.append(evolve(rank_program, params=params, buckets=tuple(buckets)))
    return tuple(programs)


@frozen
class _Cut:
    """Where in a block one stage ends and the next begins: before, between or after the layers of
    the repeat of this number.
    """

    repeat: int
    place: Literal["before", "between", "after"]

    @classmethod
    def before_stage(cls, stage: Stage) -> "_Cut":
        """The cut of forward in front of a stage."""
        layers = stage.layers[stage.begins]
        if not layers:
            return cls(stage.begins, "after")
        return cls(stage.begins, "between" if layers.start else "before")

    def get_mirror(self, repeats: int) -> "_Cut":
        """The same cut of backward."""
        place: dict[str, Literal["before", "between", "after"]] = {
            "before": "after",
            "after": "before",
        }
        return _Cut(repeats - 1 - self.repeat, place.get(self.place, "between"))


class _Block:
    """Forward or backward of all stages.

    Backward's repeats carry first the gradients that cross from stage to stage, as many as
    `crossing` says, and then sums of gradients, which each stage begins for itself.  `gradients`
    are the parameters'.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        body: Sequence[Stmt],
        crossing: Sequence[int] | None = None,
        gradients: Iterable[str] = (),
    ) -> None:
        self._groups, self._repeats = groups(pipeline, body)
        self.crossing = list[list[Arg]]()
        self._seeds = dict[str, int]()  # by where a sum begins, the repeat that does it
        for number, repeat in enumerate(self._repeats):
            carried = [arg for arg in repeat.args if arg.enter is Enter.CARRY]
            count = crossing[number] if crossing else len(carried)
            self.crossing.append(carried[:count])
            for arg in carried[count:]:
                self._seeds[arg.source] = number
        self._sums = self._find_sums(body, {*gradients})
        self._parts = dict[object, StageBlock]()

    def _find_sums(self, body: Sequence[Stmt], wanted: set[str]) -> list[Op]:
        """The sums that gradients of parameters leave the block through, in order."""
        crossing = set[str]()
        for number in range(len(self._repeats)):
            crossing.update(value.name for value in self._results(number))
        sums: list[Op] = []
        for stmt in reversed(body):
            if not isinstance(stmt, Op) or stmt.kind not in SUMS:
                continue
            if wanted & _names(stmt) and crossing.isdisjoint(stmt.inputs):
                sums.append(stmt)
                wanted |= {*stmt.inputs}
        return sums[::-1]

    def part(self, stage: Stage, begin: _Cut | None, end: _Cut | None) -> StageBlock:
        """The part of a stage between two cuts; stages that do the same share one."""
        key = (stage.groups, tuple(map(bool, stage.layers)), begin, end)
        if key not in self._parts:
            self._parts[key] = self._part(stage, begin, end)
        return self._parts[key]

    def _part(self, stage: Stage, begin: _Cut | None, end: _Cut | None) -> StageBlock:
        body, carried = list[Stmt](), list[str]()
        for number, group in enumerate(self._groups):
            body += (stmt for stmt in group if self._has(stage, stmt, number))
            if number < len(self._repeats) and stage.layers[number]:
                is_entered = begin and begin.repeat == number
                body.append(
                    self._make_entered_repeat(number) if is_entered else self._repeats[number]
                )
                carried += (value.name for value in self._results(number))
        for total in self._sums:
            _insert_sum(body, total)
        return StageBlock(self._inputs(begin), tuple(body), self._outputs(end), tuple(carried))

    def _has(self, stage: Stage, stmt: Stmt, group: int) -> bool:
        """Whether a stage does a statement of a group; sums apart."""
        if isinstance(stmt, Op) and stmt in self._sums:
            return False
        begun = [self._seeds[name] for name in _names(stmt) if name in self._seeds]
        if begun:
            return any(stage.layers[repeat] for repeat in begun)
        return group in stage.groups or is_free(stmt)

    def _inputs(self, cut: _Cut | None) -> tuple[Value, ...]:
        if not cut:
            return ()
        if cut.place == "after":
            return self._results(cut.repeat)
        return self._make_received_values(cut.repeat)

    def _outputs(self, cut: _Cut | None) -> tuple[str, ...]:
        if not cut:
            return ()
        if cut.place == "before":
            return tuple(arg.source for arg in self.crossing[cut.repeat])
        return tuple(value.name for value in self._results(cut.repeat))

    def _make_received_values(self, repeat: int) -> tuple[Value, ...]:
        """The values that cross into a repeat, by names of their own: two carries may begin as one
        value, and differ in later layers.
        """
        values = list[Value]()
        for arg in self.crossing[repeat]:
            values.append(evolve(arg.value, name=f"{arg.source}{RECEIVED}{arg.value.name}"))
        return tuple(values)

    def _results(self, repeat: int) -> tuple[Value, ...]:
        """The results of a repeat for the values that cross."""
        return self._repeats[repeat].results[: len(self.crossing[repeat])]

    def _make_entered_repeat(self, repeat: int) -> Region:
        """The repeat, which begins with what is received."""
        args, received = self._repeats[repeat].args, self._make_received_values(repeat)
        assert [*args[: len(received)]] == self.crossing[repeat], (
            "stage_programs: other arguments before what crosses"
        )
        entered = list[Arg]()
        for arg, value in zip(args, received, strict=False):
            entered.append(evolve(arg, source=value.name))
        return evolve(self._repeats[repeat], args=(*entered, *args[len(received) :]))


def _insert_sum(body: list[Stmt], total: Op) -> None:
    """Puts a sum into a body, after the last of the terms that the body has, if it has any."""
    names, place = set[str](), 0
    for number, stmt in enumerate(body, 1):
        stmt_names = _names(stmt)
        names |= stmt_names
        if not stmt_names.isdisjoint(total.inputs):
            place = number
    if not place:
        return
    terms = tuple(name for name in total.inputs if name in names)
    if terms != total.inputs:
        total = evolve(total, inputs=terms)
    body.insert(place, total)


def _names(stmt: Stmt) -> set[str]:
    return {value.name for value in results(stmt)}
