"""Reads the `forward` of a model in stages, as if one call did all of them, one behind the other.

Purpose: every branch is that of the stage to which the IR gives its ops, every loop is over the turns of the stage that
is asked for, what is handed on is what repeats carry, and no stage reads what only another one has made.
Non-goals: which stage has what (`stages`), what is declared (`held`), ops as such (`forward`).
"""

import ast
from collections.abc import Sequence

from ...ir import Enter, Pipeline, Region
from ...stages import groups, is_free, stages
from .classes import Model, Modules, Place
from .forward import Forward
from .held import condition
from .loops import Loop
from .text import demand, demand_same, targets, wrong
from .values import Entering, Seen, Stage


class StagedForward(Forward):
    """Reads it; `_group` counts the repeats that are read, behind each of which is a group of ops."""

    def __init__(
        self, model: Model, name: str, region: Region, results: Sequence[str], given: Sequence[Seen], cut: Pipeline
    ) -> None:
        super().__init__(model, name, region, results, [Stage(), Entering(), *given], Place())
        self._pipeline, self._cut = cut, groups(cut, region.body)[1]
        self._owner = {group: k for k, each in enumerate(stages(model.program, cut)) for group in each.groups}
        self._asked, self._entering = [arg.arg for arg in self._node.args.args[1:3]]
        self._count = sum(arg.enter is Enter.CARRY for arg in self._cut[0].args)
        self._crossing = [self._entering] if self._count == 1 else []  # the names of what crosses
        self._group = 0
        self._alone: dict[str, int] = {}  # modules of repeats that are not cut, and their stage
        stored = {n.id for n in ast.walk(self._node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        fixed = {self._asked} if self._count == 1 else {self._asked, self._entering}
        demand(self._node, not fixed & stored, f"binds {' or '.join(sorted(fixed))} anew")

    def read(self) -> None:
        """Reads all statements, and for which stages the class declares what they need."""
        super().read()
        self._check_branches()

    def _body(self, body: Sequence[ast.stmt]) -> None:
        """What all do, branches and turns; where what crosses is returned; the last stage's own ops."""
        rest = [*body]
        while rest and self._group < len(self._cut):
            self._of_some(rest.pop(0))
        demand(self._node, bool(rest), f"runs {self._group} of {len(self._cut)} repeats in stages, and returns")
        hands_on = f"if {self._asked} < {len(self._pipeline.turns) - 1}:\n    return {', '.join(self._crossing)}"
        demand_same(rest.pop(0), hands_on)
        super()._body(rest)

    def _of_some(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.If():
                self._branch(stmt)
            case ast.For():
                self._turns(stmt)
            case _:
                self._by_all(stmt)

    # ---- statements

    def _by_all(self, stmt: ast.stmt) -> None:
        """What every stage does, before anything else."""
        names = targets(stmt.targets[0]) if isinstance(stmt, ast.Assign) else [self._entering]
        demand(stmt, not self._group and self._entering not in names, f"every stage does `{ast.unparse(stmt)}`")
        before = len(self._ops.done)
        self._statement(stmt)
        demand(stmt, all(map(is_free, self._ops.done[before:])), f"every stage does `{ast.unparse(stmt)}`")

    def _branch(self, stmt: ast.If) -> None:
        """The ops before a repeat.  What they bind ends with the branch, but for what crosses."""
        demand_same(stmt.test, f"{self._asked} == {self._owner[self._group]}")
        before = dict(self._env)
        for inner in stmt.body:
            self._statement(inner)
        if stmt.orelse:
            self._unpack(stmt.orelse)
        for name, value in [*self._env.items()]:
            if name not in self._crossing and value != before.get(name):
                del self._env[name]

    def _unpack(self, body: Sequence[ast.stmt]) -> None:
        """`else: x, s = carried`, on the stages that something enters."""
        match body:
            case [ast.Assign(targets=[ast.Tuple() as names]) as stmt] if not self._group and not self._crossing:
                demand_same(stmt, f"{ast.unparse(names)} = {self._entering}")
                self._crossing = targets(names)
                demand(stmt, len(self._crossing) == self._count, f"unpacks {self._crossing}, not {self._count} values")
            case _:
                raise wrong(body[0], "does other than unpack what enters")

    def _turns(self, stmt: ast.For) -> None:
        """The turns of the stage that is asked for; what crosses always goes by the same names."""
        loop, dim = Loop.of_stage(self._expressions, stmt), self._cut[self._group].dim
        self._expressions.names.demand(stmt, "TURNS")
        demand_same(stmt.iter, f"TURNS[{dim!r}][{self._asked}]")
        demand(stmt, loop.names == self._crossing, f"carries {loop.names}, where {self._crossing} cross")
        self._repeat(stmt, loop)
        self._group += 1

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
