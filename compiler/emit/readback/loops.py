"""Reads the shape of a loop over modules: what is zipped, the lines before the call of the module, and those after it.

Non-goals: what the lines do (`turns`), and which repeat of the IR it is (`forward`).
"""

import ast
import re

from attrs import frozen

from .ast_matching import demand, demand_same, targets, wrong
from .expressions import Expressions


@frozen
class Loop:
    """`for item, … in zip(self.held, …): … names = item(args) …`."""

    node: ast.For
    item: str
    held: str
    zipped: dict[str, ast.expr]  # the name for one turn → those of all turns
    before: list[ast.stmt]
    names: list[str]
    args: list[ast.expr]
    after: list[ast.stmt]
    again: int  # of how many turns backward does one again; 0 for none
    turns: int  # of how many turns the loop says so, 0 where it does not

    @classmethod
    def of(cls, e: Expressions, stmt: ast.For) -> "Loop":
        """The parts of a loop."""
        demand(stmt, not stmt.orelse, "does something after the loop")
        item, *bound = targets(stmt.target)
        held, all_ = _iterated(stmt, plain=not isinstance(stmt.target, ast.Tuple))
        demand(stmt, len(bound) == len(all_), f"zips {len(all_)} for {len(bound)} names")
        calls = [(i, found) for i, inner in enumerate(stmt.body) if (found := _called(inner, item))]
        demand(stmt, len(calls) == 1, f"runs `{item}` {len(calls)} times in a turn")
        ((i, (target, call)),) = calls
        zipped, args, again, turns = dict(zip(bound, all_, strict=True)), call.args, 0, 0
        if ast.unparse(call.func) != item:
            e.names.demand(call, "recomputed")
            args, (again, turns) = call.args[1:], _every(call, zipped)
        else:
            demand(call, not call.keywords, "gives keywords")
        return cls(stmt, item, held, zipped, stmt.body[:i], targets(target), args, stmt.body[i + 1 :], again, turns)

    @classmethod
    def of_stage(cls, e: Expressions, stmt: ast.For) -> "Loop":
        """Those of `for i in …: names = self.held[str(i)](args)`, where an argument may be `all[i]`, of the turn."""
        match stmt:
            case ast.For(
                target=ast.Name(id=index), body=[ast.Assign(targets=[target], value=ast.Call() as call)], orelse=[]
            ):
                pass
            case _:
                raise wrong(stmt, "is no loop over turns, each of them one call")
        module, args, again = call.func, call.args, 0
        if isinstance(call.func, ast.Name):
            demand_same(call.func, "recomputed")
            e.names.demand(call, "recomputed")
            demand(call, bool(call.args), "does nothing again")
            module, *args = call.args
            again = _every_of(call, index)
        else:
            demand(call, not call.keywords, "gives keywords")
        held = _held(module, index)
        drawn = [arg for arg in args if isinstance(arg, ast.Subscript) and ast.unparse(arg.slice) == index]
        zipped = {ast.unparse(arg): arg.value for arg in drawn}
        return cls(stmt, index, held, zipped, [], targets(target), args, [], again, 0)


def _held(module: ast.expr, index: str) -> str:
    """The attribute with the modules, of `self.layers[str(i)]`."""
    match module:
        case ast.Subscript(value=ast.Attribute(attr=held)):
            demand_same(module, f"self.{held}[str({index})]")
            return held
        case _:
            raise wrong(module, f"`{ast.unparse(module)}` is no turn's module")


def _every_of(call: ast.Call, index: str) -> int:
    """Of how many turns one is done again, by `again=i % 2 == 0`."""
    match call.keywords:
        case []:
            return 1
        case [
            ast.keyword(arg="again", value=ast.Compare(left=ast.BinOp(right=ast.Constant(value=int(every)))) as which)
        ]:
            demand_same(which, f"{index} % {every} == 0")
            demand(which, every > 1, "does every turn again")
            return every
        case _:
            raise wrong(call, "gives keywords")


def _every(call: ast.Call, zipped: dict[str, ast.expr]) -> tuple[int, int]:
    """Of how many turns one is done again, and of how many in all: what is zipped with the modules as `again`."""
    match call.keywords:
        case []:
            return 1, 0
        case [ast.keyword(arg="again", value=ast.Name(id=name))] if name in zipped:
            which = zipped.pop(name)
        case _:
            raise wrong(call, "gives keywords")
    found = re.fullmatch(r"\[i % (\d+) == 0 for i in range\((\d+)\)\]", ast.unparse(which))
    if not found:
        raise wrong(which, f"`{ast.unparse(which)}` does not say which turns are done again")
    demand(which, int(found[1]) > 1, "does every turn again")
    return int(found[1]), int(found[2])


def _iterated(stmt: ast.For, plain: bool) -> tuple[str, list[ast.expr]]:
    """The attribute with the modules, and what is zipped with it."""
    match stmt.iter:
        case ast.Attribute(value=ast.Name(id="self"), attr=held) if plain:
            return held, []
        case ast.Call(args=[ast.Attribute(value=ast.Name(id="self"), attr=held), *zipped]) if zipped and not plain:
            given = ", ".join(map(ast.unparse, stmt.iter.args))
            demand_same(stmt.iter, f"zip({given}, strict=True)")
            return held, zipped
        case _:
            raise wrong(stmt, f"`{ast.unparse(stmt.iter)}` are no modules")


def _called(stmt: ast.stmt, item: str) -> tuple[ast.expr, ast.Call] | None:
    """The two sides of `… = item(…)` or `… = recomputed(item, …)`."""
    match stmt:
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=called)) as call) if called == item:
            return target, call
        case ast.Assign(
            targets=[target], value=ast.Call(func=ast.Name(id="recomputed"), args=[ast.Name(id=called), *_]) as call
        ) if called == item:
            return target, call
        case _:
            return None
