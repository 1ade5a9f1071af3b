"""The `forward` of a model in stages: what the stage that is asked for does.

Purpose: a branch for each group of ops, of the stage that has it; loops over the turns of that stage; and what crosses
from stage to stage, which always goes by the same Python names.
Non-goals: which stage has what (`stages`), lines within branches (`bodies`), rows (`pipeline`).
"""

from collections.abc import Sequence

from ..ir import Arg, Bucket, Enter, Pipeline, Region, Stmt
from ..ops.dropout import are_draws
from ..stages import groups, is_free, stages
from .bodies import Body, Turn
from .classes import Frame, Module, tensors
from .words import turns_word


class StagedBody(Body):
    """Writes the lines of one stage, whichever is asked for."""

    def __init__(self, frame: Frame, module: Module, body: Sequence[Stmt], ends: Sequence[str], cut: Pipeline) -> None:
        super().__init__(frame, module, body, ends)
        self._pipeline = cut
        self._groups, self._cut = groups(cut, self._body)
        self._owner = {group: k for k, each in enumerate(stages(frame.program, cut)) for group in each.groups}
        self._held: dict[str, tuple[int, ...]] = {}  # the stages of modules that only some have

    def write(self) -> None:
        """Writes what every stage does, each branch and loop, what stages hand on, and the last stage's own ops."""
        self._bind_carried([arg.value.name for arg in self._cut[0].args if arg.enter is Enter.CARRY])
        *before, last = self._groups
        self._statements(stmt for group in self._groups for stmt in group if is_free(stmt))
        for number, (group, repeat) in enumerate(zip(before, self._cut, strict=True)):
            self._branch(number, [stmt for stmt in group if not is_free(stmt)], repeat)
            self._repeat(repeat)
        self._lines.open_branch(f"if {self._stage} < {len(self._pipeline.turns) - 1}")
        self._lines.append(f"return {', '.join(self._crossing)}")
        self._lines.close_branch()
        self._statements(stmt for stmt in last if not is_free(stmt))
        self._hold(last, len(self._groups) - 1)
        self._finish()
        self._module.held |= self._needed()

    def _bind_carried(self, carried: list[str]) -> None:
        """The stage that is asked for, and what the stage before it has made: arguments before the inputs."""
        inputs, self._module.arguments = self._module.arguments, {}
        self._stage = self._lines.argument("stage", "int")
        if len(carried) > 1:
            self._given = self._lines.argument("carried", tensors(len(carried)))
        self._crossing: list[str] = []
        for value in carried:
            self._crossing.append(self._lines.free(value, *self._crossing))
        if len(carried) == 1:
            self._module.arguments[self._crossing[0]] = tensors(1)
        self._module.crossing = len(carried)
        self._module.arguments |= inputs

    def _branch(self, number: int, group: Sequence[Stmt], repeat: Region) -> None:
        """The ops before a repeat, on the stage that has them; the others are given what they need."""
        carried = _carried(repeat)
        if group or self._renamed(carried):
            self._lines.open_branch(f"if {self._stage} == {self._owner[number]}")
            self._statements(group)
            self._hand_over(carried)
            self._lines.close_branch()
        if not number and len(self._crossing) > 1:
            self._lines.open_branch("else")
            self._lines.append(f"{', '.join(self._crossing)} = {self._given}")
            self._lines.close_branch()
        self._hold(group, number)

    def _hand_over(self, carried: Sequence[str]) -> None:
        """What a branch has made gets the names by which it crosses, all at once."""
        self._end_coercions()
        if renamed := self._renamed(carried):
            self._lines.append(f"{', '.join(renamed)} = {', '.join(renamed.values())}")
        for name, value in zip(self._crossing, carried, strict=True):
            self._lines.rename(name, value)

    def _renamed(self, carried: Sequence[str]) -> dict[str, str]:
        """The names that do not yet stand for the values that a repeat carries, and what does."""
        texts = [self._lines.operand(value).text for value in carried]
        return {name: text for name, text in zip(self._crossing, texts, strict=True) if name != text}

    def _hold(self, group: Sequence[Stmt], number: int) -> None:
        """The modules of a repeat that is not cut are those of one stage."""
        whole = {stmt.dim for stmt in group if isinstance(stmt, Region)}
        children = (name for name, child in self._module.children.items() if child.dim in whole)
        self._held |= dict.fromkeys(children, (self._owner[number],))

    def _needed(self) -> dict[str, tuple[int, ...]]:
        """The stages that need an attribute, if not all do."""
        by_param = dict(self._pipeline.held)
        held = self._held | {name: by_param[param.name] for name, param in self._module.weights.items()}
        return {name: by for name, by in held.items() if len(by) < len(self._pipeline.turns)}

    # ---- repeats

    def _open(self, region: Region, attribute: str, turned: list[Bucket]) -> Turn:
        """Of a repeat that is cut, the loop over the turns of the stage that is asked for."""
        if region.dim not in self._pipeline.dims:
            return super()._open(region, attribute, turned)
        index = self._lines.free("i")
        self._lines.append(f"for {index} in {turns_word(region.dim)}[{self._stage}]:")
        draws = [f"{self._drawn_by_all(arg)}[{index}]" for arg in region.args if are_draws(arg.value.type)]
        return Turn(f"self.{attribute}[str({index})]", tuple(draws), f"{index} % {self._every(region)} == 0")

    def _drawn_by_all(self, arg: Arg) -> str:
        """The Python name of the draws of all turns."""
        self._lines.left[arg.source] -= 1
        return self._lines.operand(arg.source).text

    def _entering(self, region: Region) -> list[str]:
        """What is carried through a repeat that is cut crosses from stage to stage."""
        if region.dim not in self._pipeline.dims:
            return super()._entering(region)
        for value in _carried(region):
            self._lines.left[value] -= 1
        return self._crossing


def _carried(repeat: Region) -> list[str]:
    """What a repeat's first turn is given to carry."""
    return [arg.source for arg in repeat.args if arg.enter is Enter.CARRY]
