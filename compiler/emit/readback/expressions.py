"""Reads expressions of emitted `forward`s: each is the IR op that it does.

Purpose: Python names are followed to IR values, and tensor dims to named dims, so that a wrong operand, axis, dim or
view is seen.  Non-goals: what each function does (`calls`); statements (`forward`).
"""

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from attrs import define

from ...ir import Attr, Program, Type
from .ast_matching import Names, Ops, demand, dotted, number, terms, wrong
from .values import Axes, Buffers, FlatParams, Local, Seen, local


@define
class Expressions:
    """What a body's expressions are read with: `held` are the attributes of `self`."""

    calls: "Mapping[str, Reader]"
    views: "Mapping[str, ViewReader]"
    program: Program
    types: dict[str, Type]
    again: "Counter[str]"  # how often backward makes a result of forward once more
    whole: bool  # whether it does all of this body again
    names: Names
    ops: Ops
    held: dict[str, Seen]
    env: dict[str, Seen]
    read: set[str]  # attributes of `self` that were read
    closed: set[str]  # gathered values whose block was left

    def value(self, node: ast.expr) -> Seen:
        """What an expression gives; takes the ops that it does."""
        match node:
            case ast.Name(id=name) if name in self.env:
                return self._variable(node, self.env[name])
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self.held:
                self.read.add(name)
                return self.held[name]
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(bucket))) if name in self.env:
                demand(node, isinstance(self.env[name], FlatParams), f"`{name}` are no buckets")
                return Buffers(bucket)
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()) if (by := number(node.right)) is not None:
                kind = "scale" if isinstance(node.op, ast.Mult) else "shift"
                return self._by(node, kind, self.tensor(node.left), -by if isinstance(node.op, ast.Sub) else by)
            case ast.UnaryOp(op=ast.USub()):
                return self._by(node, "scale", self.tensor(node.operand), -1.0)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self._aligned(node, "add", [self._term(*term) for term in terms(node)])
            case ast.BinOp(op=ast.Mult()):
                return self._aligned(node, "mul", [self.tensor(node.left), self.tensor(node.right)])
            case ast.BinOp(op=ast.Div()):
                return self._aligned(node, "div", [self.tensor(node.left), self.tensor(node.right)])
            case ast.Call(func=function) if (called := dotted(function)) in self.calls:
                self.names.demand(node, called.partition(".")[0])
                return self.calls[called](self, node)
            case ast.Call(func=ast.Attribute(value=viewed, attr=view), keywords=[]) if view in self.views:
                return self.views[view](self, node, self.tensor(viewed))
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")

    def _variable(self, node: ast.Name, value: Seen) -> Seen:
        demand(
            node, not (isinstance(value, Local) and value.name in self.closed), f"`{node.id}` is read outside its block"
        )
        return value

    def _by(self, node: ast.expr, kind: str, x: Local, by: float) -> Local:
        """A product or sum with a number."""
        (result,) = self.take(node, kind, [x], {"by": by})
        return Local(result.name, x.groups)

    def _term(self, node: ast.expr, away: bool) -> Local:
        """An operand of a sum."""
        value = self.tensor(node)
        return self._by(node, "scale", value, -1.0) if away else value

    def _aligned(self, node: ast.expr, kind: str, values: list[Local]) -> Local:
        """Sums and products: torch aligns operands at their last dims, and repeats them over dims of size one."""
        (result,) = self.take(node, kind, values, {})
        for value in values:
            tail = result.groups[len(result.groups) - len(value.groups) :]
            fits = all(own in ((), full) for own, full in zip(value.groups, tail, strict=True))
            demand(node, fits, f"torch does not align {value.groups} with {result.groups} so")
        return result

    def tensor(self, node: ast.expr) -> Local:
        """The tensor that an expression gives."""
        value = self.value(node)
        if not isinstance(value, Local):
            raise wrong(node, f"`{ast.unparse(node)}` is no tensor")
        return value

    def plain(self, node: ast.expr) -> Local:
        """The tensor that an expression gives, no dims of which are joined."""
        value = self.tensor(node)
        demand(node, all(len(group) == 1 for group in value.groups), f"`{ast.unparse(node)}` has joined or added dims")
        return value

    def group(self, node: ast.expr) -> tuple[str, ...]:
        """The axes of a group of ranks."""
        value = self.value(node)
        if not isinstance(value, Axes):
            raise wrong(node, f"`{ast.unparse(node)}` is no axis")
        return value.names

    def operands(self, call: ast.Call, count: int) -> list[Local]:
        """The arguments of a call that takes `count` tensors and no more."""
        demand(call, len(call.args) == count, f"{len(call.args)} arguments, not {count}")
        return [self.plain(node) for node in call.args]

    def take(self, node: ast.AST, kind: str, operands: Sequence[Local], attrs: dict[str, Attr]) -> tuple[Local, ...]:
        """Takes an op of the IR; its results."""
        op = self.ops.take(node, kind, [operand.name for operand in operands], attrs)
        return tuple(self.local(value.name) for value in op.outputs)

    def local(self, name: str) -> Local:
        """The first value that is the same as `name`."""
        return local(self.ops.first(name), self.types)

    def sizes(self, value: Local, dims: Sequence[str]) -> tuple[int, ...]:
        """How much of `dims` one rank holds of a value."""
        return tuple(self.program.local_size(self.types[value.name], dim) for dim in dims)


Reader = Callable[[Expressions, ast.Call], Seen]
"""Reads the call of a function."""

ViewReader = Callable[[Expressions, ast.Call, Local], Local]
"""Reads the call of a method of the tensor that it is given."""
