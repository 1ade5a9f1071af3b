"""The part of a microbatch of each pipeline stage: statements of forward and backward, inputs and outputs.

The step's microbatches are those of all stages together; here they come apart, at the carries of the repeats
that are cut.  A gradient of which several stages make parts is a sum that each stage does of the parts it has.
"""

from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from ...ir import Arg, Enter, Op, Pipeline, Program, Region, Stmt, blocks, results
from ...ir.stages import Stage, groups, is_free, stages

SUMS = ("add", "cast", "coerce")
"""Ops on parts of a parameter's gradient: linear in each."""


@frozen
class Part:
    """The statements of a stage in one block; by what names it takes what enters, and hands on what leaves.

    `crossing` is what its layers hand on: other results of its repeats are for the stage alone.
    """

    takes: tuple[str, ...] = ()
    body: tuple[Stmt, ...] = ()
    gives: tuple[str, ...] = ()
    crossing: tuple[str, ...] = ()

    @property
    def made(self) -> list[str]:
        """All that it binds."""
        return [name for stmt in self.body for name in made(stmt)]


@frozen
class Share:
    """The part of a microbatch of one stage."""

    layers: dict[str, range]
    """The layers of the repeats over each dim that is split."""
    forward: Part
    backward: Part


def made(stmt: Stmt) -> list[str]:
    """The names that a statement binds for those behind it."""
    return [value.name for value in results(stmt)]


def free(pipeline: Pipeline, region: Region) -> list[Stmt]:
    """Statements that every stage does for itself before its own."""
    bodies, _ = groups(pipeline, blocks(region)[0].body)
    return [stmt for stmt in bodies[0] if is_free(stmt)]


def shares(program: Program, pipeline: Pipeline, region: Region) -> list[Share]:
    """The part of a microbatch of each stage, in the model's order."""
    all_ = stages(program, pipeline)
    borders = [None, *map(_Border.before, all_[1:]), None]
    forward, backward = blocks(region)
    ahead = _Block(pipeline, forward.body)
    back = _Mirrored(pipeline, backward.body, ahead, {end.name for end in region.yields})
    return [
        Share(
            dict(zip(pipeline.dims, stage.layers, strict=True)),
            ahead.part(stage, borders[k], borders[k + 1]),
            back.mirrored(stage, borders[k + 1], borders[k]),
        )
        for k, stage in enumerate(all_)
    ]


@frozen
class _Border:
    """Between which layers of which repeat, by number, one stage ends and another begins."""

    repeat: int
    at_start: bool
    """Before its first layer."""
    at_end: bool
    """Behind its last one."""

    @classmethod
    def before(cls, stage: Stage) -> "_Border":
        """Where a stage begins."""
        for number, layers in enumerate(stage.layers):
            if layers:
                return cls(number, layers.start == 0, False)
        return cls(len(stage.layers) - 1, False, True)

    def mirrored(self, repeats: int) -> "_Border":
        """The same as one sees it who comes from the end."""
        return _Border(repeats - 1 - self.repeat, self.at_end, self.at_start)


class _Block:
    """A block of which stages do their parts in its order."""

    def __init__(self, pipeline: Pipeline, body: Sequence[Stmt]) -> None:
        self.bodies, self.repeats = groups(pipeline, body)
        self.crossing = [[arg for arg in repeat.args if arg.enter is Enter.CARRY] for repeat in self.repeats]
        """The arguments of each repeat that cross from stage to stage."""

    def part(self, stage: Stage, enter: _Border | None, leave: _Border | None) -> Part:
        """Statements of a stage between two borders."""
        body: list[Stmt] = []
        crossing: list[str] = []
        for number, group in enumerate(self.bodies):
            if number in stage.groups:
                body += [stmt for stmt in group if not self.is_apart(stmt, number)]
            if number < len(self.repeats) and stage.layers[number]:
                body += self.begun(self.repeats[number])
                here = enter and enter.repeat == number
                body.append(self._entered(number) if here else self.repeats[number])
                crossing += self.results(number)
        return Part(self._taken(enter), tuple(body), self._given(leave), tuple(crossing))

    def is_apart(self, stmt: Stmt, group: int) -> bool:
        """Whether each stage does a statement for itself."""
        return not group and is_free(stmt)

    def begun(self, repeat: Region) -> list[Stmt]:
        """Statements of each stage before its layers of a repeat."""
        return []

    def _taken(self, border: _Border | None) -> tuple[str, ...]:
        if not border:
            return ()
        return self.results(border.repeat) if border.at_end else self._received(border.repeat)

    def _given(self, border: _Border | None) -> tuple[str, ...]:
        if not border:
            return ()
        at = border.repeat
        return tuple(arg.source for arg in self.crossing[at]) if border.at_start else self.results(at)

    def _entered(self, number: int) -> Region:
        """A repeat that begins with what is received."""
        names = self._received(number)
        args = list(self.repeats[number].args)
        assert args[: len(names)] == self.crossing[number], "verify: what crosses does not stand first"
        args[: len(names)] = [evolve(arg, source=name) for arg, name in zip(self.crossing[number], names, strict=True)]
        return evolve(self.repeats[number], args=tuple(args))

    def _received(self, number: int) -> tuple[str, ...]:
        return tuple(f"{arg.value.name} received" for arg in self.crossing[number])

    def results(self, number: int) -> tuple[str, ...]:
        """The outputs of a repeat for the values that cross."""
        return tuple(value.name for value, _ in zip(self.repeats[number].results, self.crossing[number], strict=False))


class _Mirrored(_Block):
    """Backward: what is first in forward is last.  Gradients of what crosses cross; other carries are sums."""

    def __init__(self, pipeline: Pipeline, body: Sequence[Stmt], ahead: _Block, yields: set[str]) -> None:
        super().__init__(pipeline, body)
        self._makers = {name: stmt for stmt in body for name in made(stmt)}
        self._seeds = {arg.source for args, own in self._both(ahead) for arg in args[len(own) :]}
        self.crossing = [args[: len(own)] for args, own in self._both(ahead)]
        self._sums = self._found(body, yields)
        self._apart = {id(stmt) for stmt in self._sums} | {id(self._makers[name]) for name in self._seeds}

    def _both(self, ahead: _Block) -> Iterator[tuple[list[Arg], list[Arg]]]:
        return zip(self.crossing, reversed(ahead.crossing), strict=True)

    def _found(self, body: Sequence[Stmt], wanted: set[str]) -> list[Op]:
        """The sums by which gradients of parameters leave, in order."""
        crossing = {name for number in range(len(self.repeats)) for name in self.results(number)}
        found: list[Op] = []
        for stmt in reversed(body):
            if isinstance(stmt, Op) and stmt.kind in SUMS and wanted & {*made(stmt)} and not crossing & {*stmt.inputs}:
                found.append(stmt)
                wanted = wanted | {*stmt.inputs}
        return found[::-1]

    def mirrored(self, stage: Stage, enter: _Border | None, leave: _Border | None) -> Part:
        """Statements of a stage of the model."""
        last = len(self.repeats)
        turned = Stage(tuple(last - group for group in stage.groups), stage.layers[::-1])
        part = self.part(turned, enter and enter.mirrored(last), leave and leave.mirrored(last))
        return evolve(part, body=(*part.body, *self._added(part)))

    def is_apart(self, stmt: Stmt, group: int) -> bool:
        return id(stmt) in self._apart

    def begun(self, repeat: Region) -> list[Stmt]:
        return [self._makers[arg.source] for arg in repeat.args if arg.source in self._seeds]

    def _added(self, part: Part) -> Iterator[Op]:
        """The sums, each of the parts that are there."""
        there = set(part.made)
        for op in self._sums:
            if inputs := tuple(name for name in op.inputs if name in there):
                there.update(made(op))
                yield op if inputs == op.inputs else evolve(op, inputs=inputs)
