"""Reads the lines around a turn of a repeat that move its flat buffers, and holds them to what the IR asks for.

Non-goals: what that is (`turns`), and the loop itself (`loops`).
"""

import ast
from collections.abc import Iterable, Mapping

from .ast_matching import demand, literal, wrong
from .bucket_moves import Move, Moves, Turn
from .expressions import Expressions
from .loops import Loop
from .values import Buffers


def check_moves(e: Expressions, loop: Loop, x: str, buffers: Mapping[str, Buffers], turn: Turn) -> None:
    """Raises where the lines of a loop do anything else; `x` is what they pass on, `buffers` a turn's, by name."""
    bound = sorted(each.bucket for each in buffers.values())
    turned = sorted([*turn.own, *turn.inner])
    demand(loop.node, bound == turned, f"zips the buffers of {bound}, not of {turned}")
    own = {name: each.bucket for name, each in buffers.items() if each.bucket in turn.own}
    found = Moves(*(tuple(_move(e, line, x, own) for line in lines) for lines in (loop.before, loop.after)))
    asked = turn.moves()
    demand(loop.node, found.before == asked.before, f"before a turn: {_said(found.before)}, not {_said(asked.before)}")
    demand(loop.node, found.after == asked.after, f"after a turn: {_said(found.after)}, not {_said(asked.after)}")


def _said(moves: Iterable[Move]) -> str:
    return ", ".join(map(str, moves)) or "nothing"


def _move(e: Expressions, stmt: ast.stmt, x: str, own: Mapping[str, str]) -> Move:
    match stmt:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(func=ast.Name(id=function), args=[ast.Name(id=given), ast.Name(id=buffer), *axes]) as call,
        ) if buffer in own:
            e.names.demand(call, function)
            demand(stmt, target == given == x, f"passes `{given}` on as `{target}`, not `{x}`")
            words = [(str(keyword.arg), _option(e, keyword.value)) for keyword in call.keywords]
            return Move(
                function, own[buffer], tuple(map(e.group, axes)), tuple(sorted(words, key=lambda word: word[0]))
            )
        case _:
            raise wrong(stmt, f"nothing in the IR does `{ast.unparse(stmt)}` in a turn")


def _option(e: Expressions, node: ast.expr) -> object:
    match node:
        case ast.Constant():
            return literal(node)
        case ast.Attribute(value=ast.Name(id="torch")):
            return e.names.dtype(node)
        case _:
            return e.group(node)
