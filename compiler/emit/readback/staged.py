"""Reads the `forward` of a model in stages, as if one call did all of them, one behind the other.

Purpose: every branch is that of the stage to which the IR gives its ops, every loop is over the turns of the stage that
is asked for, what is handed on is what repeats carry, and no stage reads what only another one has made.
Non-goals: which stage has what (`stages`), what is declared (`held`), ops as such (`forward`).
"""

import ast
from collections.abc import Sequence
from itertools import takewhile

from ...ir import Enter, Pipeline, Region
from ...ir.stages import groups, is_free, stages
from .ast_matching import demand, demand_same, same, targets, wrong
from .classes import Model, Modules, Place
from .forward import Forward
from .loops import Loop
from .stage_params import condition
from .values import Entering, Seen, Stage


class StagedForward(Forward):
    """Reads it; `_group` counts the repeats that are read, behind each of which is a group of ops."""

    def __init__(
        self, model: Model, name: str, region: Region, results: Sequence[str], given: Sequence[Seen], cut: Pipeline
    ) -> None:
        super().__init__(model, name, region, results, [Stage(), Entering(), *given], Place())
        self._pipeline, self._cut = cut, groups(cut, region.body)[1]
        self._stages = stages(model.program, cut)
        self._owner = {group: k for k, each in enumerate(self._stages) for group in each.groups}
        self._asked, self._entering = [arg.arg for arg in self._node.args.args[1:3]]
        self._counts = [sum(arg.enter is Enter.CARRY for arg in repeat.args) for repeat in self._cut]
        opened = {self._opens(stage.begins): self._counts[stage.begins] for stage in self._stages[1:]}
        self._is_one = [*opened.values()] == [1]  # value that crosses everywhere, and is an argument by its own name
        self._crossing: list[str] = []  # the names of what crosses where the text is read
        self._group = 0
        self._alone: dict[str, int] = {}  # modules of repeats that are not cut, and their stage
        stored = {n.id for n in ast.walk(self._node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        fixed = {self._asked} if self._is_one else {self._asked, self._entering}
        demand(self._node, not fixed & stored, f"binds {' or '.join(sorted(fixed))} anew")

    def read(self) -> None:
        """Reads all statements, and for which stages the class declares what they need."""
        super().read()
        self._check_branches()

    def _body(self, body: Sequence[ast.stmt]) -> None:
        """Before each repeat what all do and branches; its turns; where stages return; the last stage's own ops."""
        rest = [*body]
        for repeat in self._cut:
            before = [*takewhile(lambda stmt: not isinstance(stmt, ast.For), rest)]
            match rest[len(before) :]:
                case [ast.For() as turns, *rest]:
                    self._turns(before, turns, repeat.dim)
                case _:
                    raise wrong(self._node, f"runs {self._group} of {len(self._cut)} repeats in stages, and returns")
            if self._closes(self._group) and (begun := self._begun()):
                demand(self._node, bool(rest), "hands on nothing")
                hands_on = f"if {self._asked} < {begun[-1]}:\n    return {', '.join(self._crossing)}"
                demand_same(rest.pop(0), hands_on)
            self._group += 1
        super()._body(rest)

    # ---- sections: repeats that carry as many values, by the same names

    def _opens(self, number: int) -> int:
        """The first repeat of a section, of which one is given."""
        while number and self._counts[number - 1] == self._counts[number]:
            number -= 1
        return number

    def _closes(self, number: int) -> bool:
        """Whether a repeat is the last of its section."""
        return number + 1 == len(self._cut) or self._opens(number + 1) > number

    def _begun(self) -> list[int]:
        """The stages that what crosses enters in the section that is read."""
        here = self._opens(self._group)
        return [k for k, stage in enumerate(self._stages) if k and self._opens(stage.begins) == here]

    # ---- statements

    def _of_some(self, stmt: ast.stmt) -> bool:
        """Whether a statement before a repeat gives stages what they begin with."""
        if isinstance(stmt, ast.If):
            return self._branch(stmt)
        self._by_all(stmt)
        return False

    def _by_all(self, stmt: ast.stmt) -> None:
        """What every stage does, before anything else."""
        names = targets(stmt.targets[0]) if isinstance(stmt, ast.Assign) else [self._entering]
        demand(stmt, not self._group and self._entering not in names, f"every stage does `{ast.unparse(stmt)}`")
        before = len(self._ops.done)
        self._statement(stmt)
        demand(stmt, all(map(is_free, self._ops.done[before:])), f"every stage does `{ast.unparse(stmt)}`")

    def _branch(self, stmt: ast.If) -> bool:
        """The ops before a repeat, or what stages begin with that have none of these, or one and else the other.

        What ops bind ends with the branch, but for what crosses.
        """
        owner = self._owner[self._group]
        if not same(stmt.test, f"{self._asked} == {owner}"):
            self._unpack(stmt, f"{self._asked} > {owner}", f"{owner} < {self._asked}")
            return True
        before = dict(self._env)
        for inner in stmt.body:
            self._statement(inner)
        for name, value in [*self._env.items()]:
            if name not in self._crossing and value != before.get(name):
                del self._env[name]
        match stmt.orelse:
            case []:
                pass
            case [ast.If() as other]:
                self._unpack(other, "", self._asked)
            case body:
                self._unpack(ast.copy_location(ast.If(ast.Name(""), body, []), stmt), "", self._asked)
        return bool(stmt.orelse)

    def _unpack(self, stmt: ast.If, all_left: str, until: str) -> None:
        """`x, s = carried`, on the stages that begin here: all that are left, or those until one."""
        begun = self._begun()
        demand(stmt, bool(begun) and not self._is_one, "unpacks what does not enter here")
        test = all_left if begun[-1] == len(self._stages) - 1 else f"{until} <= {begun[-1]}"
        demand(stmt, ast.unparse(stmt.test) == test, f"`{ast.unparse(stmt.test)}` should be `{test}`")
        demand(stmt, len(stmt.body) == 1 and not stmt.orelse, "does other than unpack what enters")
        demand_same(stmt.body[0], f"{', '.join(self._crossing)} = {self._entering}")

    def _turns(self, before: Sequence[ast.stmt], stmt: ast.For, dim: str) -> None:
        """The turns of the stage that is asked for, and what stands before them; what crosses goes by their names."""
        loop, is_first = Loop.of_stage(self._expressions, stmt), self._opens(self._group) == self._group
        demand(stmt, is_first or loop.names == self._crossing, f"carries {loop.names}, where {self._crossing} cross")
        demand(stmt, not self._is_one or self._entering in loop.names, f"`{self._entering}` is not carried")
        gone, self._crossing = {*self._crossing} - {*loop.names}, loop.names
        unpacked = [self._of_some(inner) for inner in before]
        enters = is_first and bool(self._begun()) and not self._is_one
        demand(stmt, sum(unpacked) == enters, f"what enters is unpacked {sum(unpacked)} times")
        for name in gone:
            self._env.pop(name, None)
        self._expressions.names.demand(stmt, "LAYERS_OF_STAGE")
        demand_same(stmt.iter, f"LAYERS_OF_STAGE[{dim!r}][{self._asked}]")
        self._repeat(stmt, loop)

    def _repeat(self, stmt: ast.For, loop: Loop) -> None:
        """A repeat that is cut, or in a branch one that is not."""
        cut = bool(self._inner) and self._inner[0].dim in self._pipeline.dims
        demand(stmt, cut == isinstance(stmt.iter, ast.Subscript), "does not run the turns that come next")
        super()._repeat(stmt, loop)

    def _modules(self, node: ast.AST, name: str, region: Region) -> Modules:
        if region.dim not in self._pipeline.dims:
            self._alone[name] = self._owner[self._group]
        return super()._modules(node, name, region)

    def _turns_of(self, region: Region) -> int | str:
        return region.dim if region.dim in self._pipeline.dims else super()._turns_of(region)

    # ---- what is declared for which stages

    def _check_branches(self) -> None:
        paths = {self._model.paths.get(param, ""): held for param, held in self._pipeline.held}
        needed = {path: held for path, held in paths.items() if "." not in path}
        needed |= {name: (stage,) for name, stage in self._alone.items()}
        all_, branches = len(self._pipeline.turns), self._class.branches
        wanted = {name: condition(held) for name, held in needed.items() if len(held) < all_}
        for name in (*wanted, *branches):
            found = branches.get(name, self._node)
            demand(found, name in wanted and name in branches, f"`{name}` is needed by {needed.get(name, 'all')}")
            demand_same(branches[name], wanted[name])
