"""Reads what emitted classes declare: the headers of their methods, and what `__init__` sets.

Non-goals: which parameter a weight is, and what `forward` does (`forward`).
"""

import ast

from ...ir import Attr
from .ast_matching import Names, axes_of, demand, demand_header, demand_same, literal, statements, wrong
from .classes import Attribute, Class, Modules, Weight
from .values import Axes, Table


def read_class(node: ast.ClassDef, module: frozenset[str]) -> Class:
    """What a class sets, and its `forward`."""
    init, forward = methods(node)
    demand_header(init, "self, mesh: Mesh", "None")
    arguments, result = header(forward, module)
    demand_header(forward, ", ".join(["self", *arguments]), result)
    return Class(Init(init, module).read(), forward)


def methods(node: ast.ClassDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """`__init__` and `forward` of a module that has nothing else."""
    demand(node, [ast.unparse(base) for base in node.bases] == ["nn.Module"], "is no module")
    demand(node, not node.keywords and not node.decorator_list, "has keywords or decorators")
    match node.body[ast.get_docstring(node) is not None :]:
        case [ast.FunctionDef(name="__init__") as init, ast.FunctionDef(name="forward") as forward]:
            return init, forward
        case _:
            raise wrong(node, "is more or less than `__init__` and `forward`")


def has_modules(node: ast.ClassDef) -> bool:
    """Whether a class holds the modules of a repeat."""
    return any(isinstance(each, ast.Attribute) and each.attr in ("ModuleList", "ModuleDict") for each in ast.walk(node))


def header(forward: ast.FunctionDef, module: frozenset[str]) -> tuple[list[str], str]:
    """What the arguments and the result of a `forward` must be."""
    arguments = [f"{arg.arg}: {_type(arg, module)}" for arg in forward.args.args[1:]]
    return arguments, _result(forward)


def _type(argument: ast.arg, names: frozenset[str]) -> str:
    """Draws, without which nothing is dropped, may be none; other arguments are the flat buffers of turns."""
    said = ast.unparse(argument.annotation) if argument.annotation else ""
    inner = said.removeprefix("list[" * said.count("[")).removesuffix("]" * said.count("["))
    buffers = {"FlatParams": said == inner, "FlatParam": said != inner}.get(inner, False) and inner in names
    return said if said == "Tensor | None" or buffers else "Tensor"


def _result(forward: ast.FunctionDef) -> str:
    match forward.body[-1]:
        case ast.Return(value=ast.Tuple(elts=elements)):
            return f"tuple[{', '.join('Tensor' for _ in elements)}]"
        case _:
            return "Tensor"


class Init:
    """Reads one `__init__`."""

    def __init__(self, node: ast.FunctionDef, module: frozenset[str]) -> None:
        self._node, self._names = node, Names.of(node, module)
        self._found: dict[str, Attribute] = {}
        self._tables: dict[str, Table] = {}  # by variable

    def read(self) -> dict[str, Attribute]:
        """What every statement sets."""
        first, *rest = statements(self._node)
        demand_same(first, "super().__init__()")
        for stmt in rest:
            self._statement(stmt)
        return self._found

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Call() as call):
                self._set(stmt, name, self._attribute(call))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if name not in {
                "mesh",
                *self._tables,
            }:
                self._tables[name] = self._table(call)
            case ast.Expr(value=ast.Call(args=[ast.Constant(value=str(name)), ast.Name(id=variable)])) if (
                variable in self._tables
            ):
                demand_same(stmt, f"self.register_buffer({name!r}, {variable}, persistent=False)")
                self._set(stmt, name, self._tables.pop(variable))
            case _:
                raise wrong(stmt, f"`{ast.unparse(stmt)}` declares nothing")

    def _set(self, node: ast.AST, name: str, value: Attribute) -> None:
        demand(node, name not in self._found, f"sets `self.{name}` twice")
        self._found[name] = value

    def _attribute(self, call: ast.Call) -> Attribute:
        match ast.unparse(call.func):
            case "mesh.axis":
                return Axes(axes_of(call))
            case "weight":
                for name in (
                    "weight",
                    *(n.id for n in ast.walk(call) if isinstance(n, ast.Name) and n.id in ("normal", "ones", "zeros")),
                ):
                    self._names.demand(call, name)
                return Weight(call)
            case "nn.ModuleList":
                return self._modules(call)
            case _:
                raise wrong(call, f"`{ast.unparse(call)}` declares nothing")

    def _modules(self, call: ast.Call) -> Modules:
        self._names.demand(call, "nn")
        match call.args:
            case [
                ast.GeneratorExp(
                    elt=ast.Call(func=ast.Name(id=name)),
                    generators=[ast.comprehension(iter=ast.Call(args=[ast.Constant(value=int(count))]))],
                )
            ]:
                demand_same(call, f"nn.ModuleList({name}(mesh) for _ in range({count}))")
                self._names.demand(call, name)
                return Modules(name, count)
            case _:
                raise wrong(call, "is no list of so many modules of a class")

    def _table(self, call: ast.Call) -> Table:
        self._names.demand(call, "rope_frequencies")
        given = {str(keyword.arg): keyword.value for keyword in call.keywords}
        scaling = tuple((key, _scaling(call, key, node)) for key, node in list(given.items())[4:])
        demand(call, {*given} >= {"theta", "between", "mesh", "dtype"}, "lacks what a table needs")
        theta, dtype = literal(given["theta"]), ast.unparse(given["dtype"])
        sizes = [literal(node) for node in (*call.args, given["between"])]
        match sizes:
            case [int(seq), int(dim), int(between)] if isinstance(theta, int | float):
                more = "".join(f", {key}={value!r}" for key, value in scaling)
                sizes = f"{seq}, {dim}, theta={theta!r}, between={between}"
                demand_same(call, f"rope_frequencies({sizes}, mesh=mesh, dtype={dtype}{more})")
                return Table(seq, dim, theta, between, dtype, scaling)
            case _:
                raise wrong(call, "is no table of rotary positions")


def _scaling(call: ast.Call, key: str, node: ast.expr) -> Attr:
    """An option of a table, which scales its angles."""
    value = literal(node)
    demand(call, key in ("scaling", "factor", "low", "high", "original"), f"a table has no option {key}")
    if not isinstance(value, str | float):
        raise wrong(call, f"{key} = {value!r}")
    return value
