"""What the readers of emitted text share: nodes compared with text, names, and the ledger of ops.

Purpose: the small words in which they say what the text must be.  Non-goals: what any statement means.
"""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import frozen

from ...ir import Attr, Op, Stmt

DTYPES = {"f16": "torch.float16", "bf16": "torch.bfloat16", "f32": "torch.float32", "f64": "torch.float64"}
"""Torch's words for element types."""


BUILT_IN = frozenset({"len", "range", "str", "super", "zip"})
"""What of Python programs use under its own name."""


def wrong(node: ast.AST, what: str) -> AssertionError:
    """The error that the text of `node` is not what the IR says."""
    return AssertionError(f"emit: line {getattr(node, 'lineno', 0)}: {what}")


def demand(node: ast.AST, holds: bool, what: str) -> None:
    """Raises where the text of `node` is not what the IR says."""
    if not holds:
        raise wrong(node, what)


def same(node: ast.expr | ast.stmt, text: str) -> bool:
    """Whether `node` is the expression or statement `text`, but for layout and comments."""
    other = ast.parse(text, mode="eval").body if isinstance(node, ast.expr) else ast.parse(text).body[0]
    return ast.dump(node) == ast.dump(other)


def demand_same(node: ast.expr | ast.stmt, text: str) -> None:
    """Raises where `node` is anything but `text`."""
    demand(node, same(node, text), f"`{ast.unparse(node)}` should be `{text}`")


def literal(node: ast.expr) -> object:
    """The value of a literal."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise wrong(node, f"`{ast.unparse(node)}` is no literal") from None


def keywords(call: ast.Call, *names: str) -> dict[str, ast.expr]:
    """The keyword arguments of a call, which must be those named, each once."""
    found = {str(keyword.arg): keyword.value for keyword in call.keywords}
    demand(
        call,
        sorted(found) == sorted(names) and len(call.keywords) == len(names),
        f"keywords {list(found)}, not {list(names)}",
    )
    return found


def demand_header(function: ast.FunctionDef, arguments: str, result: str, *decorators: str) -> None:
    """Raises where a function takes or returns anything else, or is decorated otherwise."""
    found = ast.unparse(function.args), function.returns and ast.unparse(function.returns)
    demand(function, found == (arguments, result), f"the header of `{function.name}` is {found}")
    demand(function, [ast.unparse(node) for node in function.decorator_list] == list(decorators), "is decorated")


def statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """The body without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def targets(node: ast.expr) -> list[str]:
    """The names that an assignment to `node` binds."""
    elements = node.elts if isinstance(node, ast.Tuple) else [node]
    names = [element.id for element in elements if isinstance(element, ast.Name)]
    demand(node, len(set(names)) == len(elements), f"cannot assign to `{ast.unparse(node)}`")
    return names


def number(node: ast.expr) -> float | None:
    """The float that a literal is, or nothing."""
    match node:
        case ast.Constant(value=float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() as value)):
            return -value
        case _:
            return None


def real(node: ast.expr) -> float:
    """The float that a literal is; raises where it is none."""
    value = literal(node)
    if not isinstance(value, float):
        raise wrong(node, f"{value!r} is no number")
    return value


def dotted(node: ast.expr) -> str:
    """The text of `name` or `name.name`; "" for any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
        case _:
            return ""


def terms(node: ast.expr) -> list[tuple[ast.expr, bool]]:
    """The operands of `a + b - c`, which is one sum, and whether each is taken away."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()) if number(node.right) is None:
            return [*terms(node.left), (node.right, isinstance(node.op, ast.Sub))]
        case _:
            return [(node, False)]


def axes_of(call: ast.Call) -> tuple[str, ...]:
    """The axes of a call `mesh.axis(…)`."""
    keywords(call)
    names = tuple(str(literal(node)) for node in call.args)
    demand_same(call, f"mesh.axis({', '.join(map(repr, names))})")
    return names


@frozen
class Names:
    """The names that a function may use: those of its module, but for those that it binds itself."""

    module: frozenset[str]
    local: frozenset[str]

    @classmethod
    def of(cls, function: ast.FunctionDef, module: Iterable[str]) -> "Names":
        """The names of one function."""
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        demand(function, not {"self", *BUILT_IN} & stored, "binds a name that it needs")
        return cls(frozenset(module), frozenset(stored | {arg.arg for arg in function.args.args}))

    def demand(self, node: ast.AST, name: str) -> None:
        """Raises where `name` is not the module's."""
        demand(node, name in self.module, f"`{name}` is not imported or defined")
        demand(node, name not in self.local, f"`{name}` is a variable here, and hides what the module calls so")

    def dtype(self, node: ast.expr) -> str:
        """The element type that torch's word stands for."""
        self.demand(node, "torch")
        known = [name for name, word in DTYPES.items() if same(node, word)]
        demand(node, bool(known), f"`{ast.unparse(node)}` is no element type")
        return known[0]


Key = tuple[str, tuple[str, ...], frozenset[tuple[str, Attr]]]


class Ops:
    """The ops of one body, each to be taken once, when the text is seen to do it, and coercions and repeats in order.

    `same` maps a value to the first one that is computed alike, so that it does not matter which of two equal ops a
    call stands for; it is extended in place.  What is `silent` needs no call: its result is another name for its input.
    """

    def __init__(self, body: Iterable[Stmt], same: dict[str, str], silent: Callable[[Op], bool]) -> None:
        self.same = same
        self.done: list[Op] = []
        self._left: dict[Key, list[Op]] = {}
        self._turns: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, Op) and silent(stmt):
                self.same[stmt.outputs[0].name] = self.first(stmt.inputs[0])
                self.done.append(stmt)
                continue
            if isinstance(stmt, Op):
                self._add(stmt)
            if not isinstance(stmt, Op) or stmt.kind == "coerce":
                self._turns.append(stmt)

    def _add(self, op: Op) -> None:
        alike = self._left.setdefault(self._key(op.kind, op.inputs, dict(op.attrs)), [])
        alike.append(op)
        self.same.update({value.name: first.name for value, first in zip(op.outputs, alike[0].outputs, strict=True)})

    def first(self, name: str) -> str:
        """The first value that is the same as `name`."""
        return self.same.get(name, name)

    def has(self, kind: str, inputs: Sequence[str], attrs: Mapping[str, Attr]) -> bool:
        """Whether such an op is left."""
        return bool(self._left.get(self._key(kind, inputs, attrs)))

    def take(self, node: ast.AST, kind: str, inputs: Sequence[str], attrs: Mapping[str, Attr]) -> Op:
        """Takes one op of this kind, inputs and attributes; raises where none is left."""
        alike = self._left.get(self._key(kind, inputs, attrs))
        if not alike:
            said = ", ".join(f"{key}={value}" for key, value in attrs.items())
            raise wrong(node, f"the IR has no {kind}({', '.join(inputs)}) <{said}> here that is not done yet")
        self.done.append(alike.pop(0))
        return self.done[-1]

    def in_turn(self, node: ast.AST, stmt: Stmt) -> None:
        """Raises where another coercion or repeat of the body comes first: what communicates has one order."""
        demand(node, self._turns.pop(0) is stmt, "comes before what the IR communicates first")

    def finish(self, node: ast.AST) -> int:
        """How many ops were taken; raises where some are left."""
        left = [op for alike in self._left.values() for op in alike]
        demand(node, not left, f"nothing does {', '.join(f'{op.outputs[0].name} = {op.kind}(…)' for op in left)}")
        return len(self.done)

    def _key(self, kind: str, inputs: Sequence[str], attrs: Mapping[str, Attr]) -> Key:
        return kind, tuple(map(self.first, inputs)), frozenset(attrs.items())
