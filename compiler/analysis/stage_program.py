"""The programs of one pipeline stage, and of one rank with all of its stages.

The IR of a step is that of all stages together.  Here it is cut at the carries of the repeats that
are split.  A stage's program has the stage's layers and statements; its blocks say what they
receive and send.  A gradient of which several stages have terms is a sum that each stage does of
the terms that it has.  Non-goals: when stages work (`schedules`).
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from attrs import evolve, frozen

from ..ir import Enter, Op, Pipeline, Program, Region, Stmt, Value, once, results
from ..ir.stages import Stage, groups, is_free, layers_of_rank, stages, stages_of_param
from .stage_buckets import chunks, with_chunks

RECEIVED = " received as "
"""In the name of a received value: after that of the value on the stage before, before that of
the layers' argument.
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
    def made(self) -> list[str]:
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
        layers = ((len(own), own.start % every) for own in self.layers.values())
        return (id(self.forward), id(self.backward), *layers)


@once
def stage_programs(program: Program) -> tuple[StageProgram, ...]:
    """The programs of all stages, in the model's order."""
    assert program.pipeline, "stage_programs: no pipeline"
    pipeline, all_ = program.pipeline, stages(program, program.pipeline)
    microbatches, ahead, back = program.microbatches, program.forward, program.backward
    forward = _Block(pipeline, ahead.body)
    crossing = [
        sum(arg.value.type.differentiable for arg in args) for args in reversed(forward.crossing)
    ]
    backward = _Block(pipeline, back.body, crossing, {end.name for end in microbatches.yields})
    cuts, last = [None, *map(_Cut.before_stage, all_[1:]), None], len(pipeline.dims)
    found: list[StageProgram] = []
    for stage, begin, end in zip(all_, cuts, cuts[1:], strict=False):
        own = forward.part(stage, begin, end)
        mirrored = Stage(tuple(last - group for group in stage.groups), stage.layers[::-1])
        grads = backward.part(mirrored, end and end.mirrored(last), begin and begin.mirrored(last))
        layers = dict(zip(pipeline.dims, stage.layers, strict=True))
        body = evolve(ahead, body=own.body), evolve(back, body=grads.body)
        step = (
            evolve(stmt, body=body) if stmt is microbatches else stmt
            for stmt in program.region.body
        )
        sized = program.sized({dim: len(its) for dim, its in layers.items()})
        whole = evolve(sized, region=evolve(program.region, body=tuple(step)))
        found.append(StageProgram(whole, layers, own, grads))
    return tuple(found)


@once
def rank_programs(program: Program) -> tuple[Program, ...]:
    """The programs with the parameters, layers and buckets of each rank along the pipeline's axis.

    Their statements are those of all stages, so they need not be legal.
    """
    pipeline = program.pipeline
    assert pipeline, "rank_programs: no pipeline"
    ranks = {
        p.name: {pipeline.stage_to_rank[k] for k in stages_of_param(program, pipeline, p)}
        for p in program.params
    }
    found: list[Program] = []
    for rank, own in enumerate(chunks(program)):
        sized = program.sized(
            {dim: len(layers) for dim, layers in layers_of_rank(program, pipeline, rank).items()}
        )
        params = tuple(param for param in program.params if rank in ranks[param.name])
        buckets = (
            evolve(b, params=tuple(name for name in b.params if rank in ranks[name]))
            for b in program.buckets
        )
        found.append(evolve(with_chunks(sized, own), params=params, buckets=tuple(buckets)))
    return tuple(found)


@frozen
class _Cut:
    """Where in a block one stage ends and the next begins: by the layers of the repeat of this
    number.
    """

    repeat: int
    place: Literal["before", "between", "after"]

    @classmethod
    def before_stage(cls, stage: Stage) -> "_Cut":
        """The cut of forward in front of a stage."""
        layers = stage.layers[stage.begins]
        return cls(stage.begins, "after" if not layers else "between" if layers.start else "before")

    def mirrored(self, repeats: int) -> "_Cut":
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
        carried = [
            [arg for arg in repeat.args if arg.enter is Enter.CARRY] for repeat in self._repeats
        ]
        counts = crossing or [*map(len, carried)]
        self.crossing = [args[:count] for args, count in zip(carried, counts, strict=True)]
        self._seeds = {
            arg.source: at for at, args in enumerate(carried) for arg in args[counts[at] :]
        }
        self._sums = self._find_sums(body, {*gradients})
        self._parts = dict[object, StageBlock]()

    def _find_sums(self, body: Sequence[Stmt], wanted: set[str]) -> list[Op]:
        """The sums by which gradients of parameters leave the block, in order."""
        crossing = {value.name for at in range(len(self._repeats)) for value in self._results(at)}
        found: list[Op] = []
        for stmt in reversed(body):
            if (
                isinstance(stmt, Op)
                and stmt.kind in SUMS
                and wanted & _names(stmt)
                and not crossing & {*stmt.inputs}
            ):
                found.append(stmt)
                wanted |= {*stmt.inputs}
        return found[::-1]

    def part(self, stage: Stage, begin: _Cut | None, end: _Cut | None) -> StageBlock:
        """The part of a stage between two cuts; that of stages which do the same is one."""
        key = (stage.groups, tuple(map(bool, stage.layers)), begin, end)
        if key not in self._parts:
            self._parts[key] = self._part(stage, begin, end)
        return self._parts[key]

    def _part(self, stage: Stage, begin: _Cut | None, end: _Cut | None) -> StageBlock:
        body = list[Stmt]()
        for at, group in enumerate(self._groups):
            body += (stmt for stmt in group if self._has(stage, stmt, at))
            if at < len(self._repeats) and stage.layers[at]:
                body.append(
                    self._entered(at) if begin and begin.repeat == at else self._repeats[at]
                )
        for total in self._sums:  # each after the last of its terms
            if after := [at for at, stmt in enumerate(body, 1) if _names(stmt) & {*total.inputs}]:
                made = {name for stmt in body for name in _names(stmt)}
                terms = tuple(name for name in total.inputs if name in made)
                body.insert(
                    after[-1], total if terms == total.inputs else evolve(total, inputs=terms)
                )
        carried = (
            value.name
            for at, layers in enumerate(stage.layers)
            if layers
            for value in self._results(at)
        )
        return StageBlock(self._inputs(begin), tuple(body), self._outputs(end), tuple(carried))

    def _has(self, stage: Stage, stmt: Stmt, group: int) -> bool:
        """Whether a stage does a statement of a group; sums apart."""
        if isinstance(stmt, Op) and stmt in self._sums:
            return False
        if begun := [self._seeds[name] for name in _names(stmt) if name in self._seeds]:
            return any(stage.layers[repeat] for repeat in begun)
        return group in stage.groups or is_free(stmt)

    def _inputs(self, cut: _Cut | None) -> tuple[Value, ...]:
        if not cut:
            return ()
        return self._results(cut.repeat) if cut.place == "after" else self._received(cut.repeat)

    def _outputs(self, cut: _Cut | None) -> tuple[str, ...]:
        if not cut:
            return ()
        if cut.place == "before":
            return tuple(arg.source for arg in self.crossing[cut.repeat])
        return tuple(value.name for value in self._results(cut.repeat))

    def _received(self, repeat: int) -> tuple[Value, ...]:
        """Two carries may begin as one value, and differ in later layers; so each has a name of
        its own.
        """
        crossing = self.crossing[repeat]
        return tuple(
            evolve(arg.value, name=f"{arg.source}{RECEIVED}{arg.value.name}") for arg in crossing
        )

    def _results(self, repeat: int) -> tuple[Value, ...]:
        """The results of a repeat for the values that cross."""
        return self._repeats[repeat].results[: len(self.crossing[repeat])]

    def _entered(self, repeat: int) -> Region:
        """The repeat, which begins with what is received."""
        args, received = self._repeats[repeat].args, self._received(repeat)
        assert [*args[: len(received)]] == self.crossing[repeat], (
            "stage_programs: other arguments before what crosses"
        )
        own = (evolve(arg, source=value.name) for arg, value in zip(args, received, strict=False))
        return evolve(self._repeats[repeat], args=(*own, *args[len(received) :]))


def _names(stmt: Stmt) -> set[str]:
    return {value.name for value in results(stmt)}
