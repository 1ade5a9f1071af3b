"""Emitted programs in which one coercion is left out, or is another one.

Non-goals: defects that are no coercion's (`test_readback` plants many).
"""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from helpers.spmd_types_rules import COERCIONS

NAMES = {*COERCIONS, "all_reduce_", "regather"}
OTHERS = {
    "replicate": ["all_reduce"],
    "all_reduce": ["replicate"],
    "all_gather": ["all_gather_invariant"],
    "regather": ["all_gather_invariant", "all_gather"],
    "reduce_scatter": ["take_shard", "all_reduce"],
}
"""The functions that each may be mistaken for; most keep all shapes, so that nothing but types
can tell.
"""
WITHOUT_DIM = {"replicate", "all_reduce"}


@dataclass(frozen=True)
class Planted:
    """A program with one defect, and in words where and which."""

    defect: str
    coercion: str
    text: str

    def __str__(self) -> str:
        return f"{self.coercion}: {self.defect}"


def planted(text: str) -> Iterator[Planted]:
    """Each coercion of a program's text with each defect that it can have."""
    tree = ast.parse(text)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        axes = [name for node in function.body for name in _axis(node)]
        for call in [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and _name(node) in NAMES
        ]:
            for defect, new in _defects(call, axes):
                changed = _Replace(call, new).visit(deepcopy(tree, {id(call): call}))
                yield Planted(
                    defect, ast.unparse(call), ast.unparse(ast.fix_missing_locations(changed))
                )


def _axis(node: ast.stmt) -> list[str]:
    """The name that a statement gives to an axis, if it does."""
    if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("mesh.axis("):
        return [ast.unparse(node.targets[0])]
    return []


def _name(node: ast.AST) -> str:
    """The name that a call calls."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _defects(call: ast.Call, axes: list[str]) -> Iterator[tuple[str, ast.expr]]:
    """The texts that may take the place of a call, and in words."""
    name, (operand, axis, *_), keywords = _name(call), call.args, call.keywords
    yield "left out", operand
    if name != "regather":
        yield "twice", ast.Call(call.func, [call, axis], keywords)
    if ast.unparse(axis) in axes and len(axes) > 1:
        other = axes[axes.index(ast.unparse(axis)) - 1]
        yield f"over {other}", ast.Call(call.func, [operand, ast.Name(other)], keywords)
    if any(keyword.arg == "op" for keyword in keywords):
        return
    for other in OTHERS.get(name, []):
        yield (
            f"as {other}",
            ast.Call(ast.Name(other), [operand, axis], [] if other in WITHOUT_DIM else keywords),
        )
    for keyword in keywords:
        dim = 1 - ast.literal_eval(keyword.value)
        yield (
            f"along {dim}",
            ast.Call(call.func, [operand, axis], [ast.keyword(keyword.arg, ast.Constant(dim))]),
        )


class _Replace(ast.NodeTransformer):
    """Puts `new` in the place of `old`; a `with` whose call is no block any more becomes an
    assignment.
    """

    def __init__(self, old: ast.Call, new: ast.expr) -> None:
        self._old, self._new = old, new

    def visit_Call(self, node: ast.Call) -> ast.expr:
        return self._new if node is self._old else self._into(node)

    def visit_With(self, node: ast.With) -> ast.With | list[ast.stmt]:
        item = node.items[0]
        if item.context_expr is self._old and _name(self._new) != "regather":
            assert item.optional_vars is not None
            return [ast.Assign([item.optional_vars], self._new), *node.body]
        return self._into(node)

    def _into(self, node: ast.Call | ast.With) -> Any:
        self.generic_visit(node)
        return node
