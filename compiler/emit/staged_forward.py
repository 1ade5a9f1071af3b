"""The `forward` of a model in stages: the lines that the requested stage runs.

Purpose: a branch for each group of ops, for the stage that has it; loops over the layers of that
stage; the values that cross from stage to stage.  Repeats in a row that carry as many values make
up a section.  In a section these values always have the same Python names; stages that are cut
within it begin before it, and return after it.  Non-goals: which stage has what (`ir.stages`),
lines within branches (`forward`), rows (`schedules`).
"""

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

from ..ir import Arg, Enter, Pipeline, Program, Region, Stmt
from ..ir.stages import groups, is_free, stages
from ..ops.dropout import are_draws
from .forward import Body
from .layer_loops import RepeatLoops, recompute_interval
from .line_writer import Lines
from .loop_hooks import LayerCall
from .module import tensors
from .naming import layers_word, stage_word


@frozen
class _Section:
    """Repeats by number, the Python names of what they carry, and the stages but the first that
    begin in them.
    """

    repeats: range
    names: tuple[str, ...]
    begin: tuple[int, ...]


class StagedBody:
    """Writes `body` as the lines of one stage, whichever is asked for."""

    def __init__(self, body: Body, pipeline: Pipeline) -> None:
        self._body, self._lines, self._module = body, body.lines, body.module
        self._is_local, self._pipeline = body.frame.target.local, pipeline
        self._groups, self._cut = groups(pipeline, body.stmts)
        self._stages = stages(body.frame.program, pipeline)
        self._owner = dict[int, int]()  # group → its stage
        for number, stage in enumerate(self._stages):
            self._owner |= dict.fromkeys(stage.groups, number)
        self._held: dict[str, tuple[int, ...]] = {}  # the stages of modules that only some have
        self._inputs, self._module.arguments = self._module.arguments, {}
        # a module of torch's pipelining has one stage
        self._stage = self._lines.argument("stage", "int") if self._is_local else "self.stage"
        self._loops = StageLayers(
            body.frame.program, pipeline, self._lines, body.loops, self._stage
        )
        body.loops = self._loops

    def write(self) -> None:
        """Writes what every stage does, each section, and the last stage's own ops."""
        body = self._body
        sections = self._bind_carried()
        body.write_statements(stmt for group in self._groups for stmt in group if is_free(stmt))
        for section in sections:
            self._loops.carried = section.names
            for number in section.repeats:
                self._branch(number, section)
                body.write_repeat(self._cut[number])
            self._return(section)
        last = self._groups[-1]
        body.write_statements(stmt for stmt in last if not is_free(stmt))
        self._hold(last, len(self._groups) - 1)
        self._lines.finish(body.ends)
        self._module.held |= self._needed()

    # ---- what crosses

    def _bind_carried(self) -> list[_Section]:
        """Binds the values that the stage before returned, as arguments before the inputs.

        Torch's pipelining calls its first stage without any values.
        """
        local = self._is_local
        carried = [self._values_carried(repeat) for repeat in self._cut]
        counts = [len(carried[stage.begins]) for stage in self._stages[1:]]
        self._module.crossing = tuple(dict.fromkeys(counts))
        runs = self._runs_with_stages([*map(len, carried)])
        cut_runs = [run for run, begin in runs if begin]
        is_one = local and self._module.crossing == (1,) and len(cut_runs) == 1
        if not local:
            self._given = self._lines.argument("received", "Tensor")
            self._module.arguments = {f"*{self._given}": "Tensor"}
        elif not is_one:
            self._given = self._lines.argument("carried", tensors(*self._module.crossing))
        sections = list[_Section]()
        for run, begin in runs:
            sections.append(_Section(run, self._free_names(carried[run.start]), begin))
        if is_one:  # then the argument has the name that the section gives the value
            (self._given,) = next(section.names for section in sections if section.begin)
            self._module.arguments[self._given] = tensors(1)
        self._module.arguments |= self._inputs
        return sections

    def _values_carried(self, repeat: Region) -> list[str]:
        """The values that a layer of a repeat gets from the layer before it."""
        return [arg.value.name for arg in repeat.args if arg.enter is Enter.CARRY]

    def _runs_with_stages(self, counts: Sequence[int]) -> list[tuple[range, tuple[int, ...]]]:
        """Neighbouring repeats that carry as many values, each with the stages but the first that
        begin in them.
        """
        later = [*enumerate(self._stages)][1:]
        runs = list[tuple[range, tuple[int, ...]]]()
        for run in _runs(counts):
            runs.append((run, tuple(number for number, stage in later if stage.begins in run)))
        return runs

    def _free_names(self, values: Sequence[str]) -> tuple[str, ...]:
        names: list[str] = []
        for value in values:
            names.append(self._lines.free(value, *names))
        return tuple(names)

    def _branch(self, number: int, section: _Section) -> None:
        """Writes the ops before a repeat, on the stage that has them; stages that begin in the
        section receive its values.
        """
        group = [stmt for stmt in self._groups[number] if not is_free(stmt)]
        carried, owner = _values_entering(self._cut[number]), self._owner[number]
        is_open = bool(group or self._names_to_rebind(carried))
        if is_open:
            self._lines.open_branch(f"if {self._stage} == {self._word(owner)}")
            self._body.write_statements(group)
            self._hand_over(carried)
            self._lines.close_branch()
        if number == section.repeats.start:
            self._unpack(section, owner, is_open)
        self._hold(group, number)

    def _unpack(self, section: _Section, owner: int, behind_branch: bool) -> None:
        """Unpacks the values received by stages that begin here, after the `owner` of the ops
        before.
        """
        if not section.begin or section.names == (self._given,):
            return
        if section.begin[-1] == len(self._stages) - 1:
            head = "else" if behind_branch else f"if {self._stage} > {self._word(owner)}"
        else:
            until = f"{self._stage} <= {section.begin[-1]}"
            head = f"elif {until}" if behind_branch else f"if {self._word(owner)} < {until}"
        self._lines.open_branch(head)
        names = ", ".join(section.names)
        if not self._is_local and len(section.names) == 1:
            names = f"({names},)"  # torch's pipelining passes even one value as a tuple
        self._lines.append(f"{names} = {self._given}")
        self._lines.close_branch()

    def _word(self, stage: int) -> str:
        return stage_word(stage, len(self._stages))

    def _return(self, section: _Section) -> None:
        """Stages whose next one begins in the section hand on its values."""
        if not section.begin:
            return
        self._lines.open_branch(f"if {self._stage} < {self._word(section.begin[-1])}")
        copied = set[int]()
        for number in section.repeats:
            copied |= {*self._unchanged_values(self._cut[number])}
        texts = list[str]()
        for index, name in enumerate(section.names):
            texts.append(f"{name}.clone()" if index in copied else name)
        why = "a copy, for torch detaches in place what a stage returns" if copied else ""
        self._lines.append(f"return {', '.join(texts)}", why)
        self._lines.close_branch()

    def _unchanged_values(self, repeat: Region) -> list[int]:
        """The numbers of carried values that recomputed layers do not change, where torch's
        backward has two parts.
        """
        if self._is_local or not (
            self._pipeline.splits and recompute_interval(self._body.frame.program, repeat)
        ):
            return []
        indices = list[int]()
        ends = zip(self._values_carried(repeat), repeat.yields, strict=False)
        for index, (name, end) in enumerate(ends):
            if end.name == name:
                indices.append(index)
        return indices

    def _hand_over(self, carried: Sequence[str]) -> None:
        """Gives the results of a branch the names that they cross with, all at once."""
        self._body.end_coercions()
        if renamed := self._names_to_rebind(carried):
            self._lines.append(f"{', '.join(renamed)} = {', '.join(renamed.values())}")
        for name, value in zip(self._loops.carried, carried, strict=True):
            self._lines.rename(name, value)

    def _names_to_rebind(self, carried: Sequence[str]) -> dict[str, str]:
        """The names that are not yet bound to the values that a repeat carries, with their
        expressions.
        """
        texts = [self._lines.operand(value).text for value in carried]
        renamed = dict[str, str]()
        for name, text in zip(self._loops.carried, texts, strict=True):
            if name != text:
                renamed[name] = text
        return renamed

    def _hold(self, group: Sequence[Stmt], number: int) -> None:
        """Notes that the modules of a repeat that is not cut belong to one stage."""
        whole = {stmt.dim for stmt in group if isinstance(stmt, Region)}
        for name, child in self._module.children.items():
            if child.dim in whole:
                self._held[name] = (self._owner[number],)

    def _needed(self) -> dict[str, tuple[int, ...]]:
        """The stages that need an attribute, if not all do."""
        by_param = dict(self._pipeline.param_stages)
        stages_of = dict(self._held)
        for name, param in self._module.weights.items():
            if param.name in by_param:
                stages_of[name] = by_param[param.name]
        count = len(self._pipeline.layers)
        return {name: stages for name, stages in stages_of.items() if len(stages) < count}


class StageLayers:
    """Loops over the requested stage's layers of a repeat that is cut, and as `uncut` does over
    all layers of any other repeat.
    """

    def __init__(
        self, program: Program, pipeline: Pipeline, lines: Lines, uncut: RepeatLoops, stage: str
    ) -> None:
        self._program, self._pipeline, self._lines = program, pipeline, lines
        self._uncut, self._stage = uncut, stage
        self.carried: tuple[str, ...] = ()
        """The Python names of the values that cross in the section that is written."""

    def enter(self, region: Region) -> list[str]:
        """The names with which values cross, for these are bound already."""
        if region.dim not in self._pipeline.dims:
            return self._uncut.enter(region)
        for value in _values_entering(region):
            self._lines.left[value] -= 1
        return [*self.carried]

    def open(
        self, region: Region, attribute: str, has_params: bool, inner: Sequence[str]
    ) -> LayerCall:
        """Opens the loop over the numbers of the stage's layers."""
        if region.dim not in self._pipeline.dims:
            return self._uncut.open(region, attribute, has_params, inner)
        index = self._lines.free("i")
        self._lines.append(f"for {index} in {layers_word(region.dim)}[{self._stage}]:")
        draws = list[str]()
        for arg in region.args:
            if are_draws(arg.value.type):
                draws.append(f"{self._draws_of_all_layers(arg)}[{index}]")
        interval = recompute_interval(self._program, region)
        module = f"self.{attribute}[str({index})]"
        return LayerCall(module, tuple(draws), f"{index} % {interval} == 0")

    def _draws_of_all_layers(self, arg: Arg) -> str:
        """The Python name of the draws of all layers."""
        self._lines.left[arg.source] -= 1
        return self._lines.operand(arg.source).text


def _runs(counts: Sequence[int]) -> list[range]:
    """Neighbours of the same count."""
    starts = [
        number for number, count in enumerate(counts) if not number or count != counts[number - 1]
    ]
    return [range(*ends) for ends in pairwise([*starts, len(counts)])]


def _values_entering(repeat: Region) -> list[str]:
    """The values that enter a repeat's first layer."""
    return [arg.source for arg in repeat.args if arg.enter is Enter.CARRY]
