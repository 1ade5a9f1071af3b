"""Reads the class of a model in stages: what it declares, and for which stages it does.

Non-goals: which stages need what (`staged`, which reads `forward`).
"""

import ast
from collections.abc import Sequence

from .ast_matching import demand, demand_header, demand_same, wrong
from .classes import Attribute, Class, Modules, Weight
from .declarations import Init, header, methods

STAGES = "stages"
"""What `__init__` calls the stages of this rank."""


def read_staged_class(node: ast.ClassDef, module: frozenset[str], counts: Sequence[int]) -> Class:
    """What the class sets, and its `forward`; at each cut so many values lead from stage to stage."""
    init, forward = methods(node)
    demand_header(init, f"self, mesh: Mesh, {STAGES}: tuple[int, ...]", "None")
    arguments, result = header(forward, module)
    crossing = dict.fromkeys("Tensor" if n == 1 else f"tuple[{', '.join(['Tensor'] * n)}]" for n in counts)
    demand(forward, len(arguments) >= 2, "is given no stage, and nothing of the stage before")
    asked, entering, *_ = (arg.arg for arg in forward.args.args[1:])
    arguments[:2] = [f"{asked}: int", f"{entering}: {' | '.join(crossing)}"]
    results = dict.fromkeys([*crossing, result])
    demand_header(forward, ", ".join(["self", *arguments]), " | ".join(results))
    reader = _Init(init, module)
    return Class(reader.read(), forward, reader.branches)


class _Init(Init):
    """Reads `__init__`; `branches` has the conditions of what stands in some."""

    def __init__(self, node: ast.FunctionDef, module: frozenset[str]) -> None:
        super().__init__(node, module)
        self.branches: dict[str, ast.expr] = {}
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        demand(node, not {STAGES, "mesh"} & stored, "binds a name that it needs")

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.If(test=test, body=body, orelse=[]):
                for inner in body:
                    self.branches[self._declared(inner)] = test
            case _:
                super()._statement(stmt)

    def _declared(self, stmt: ast.stmt) -> str:
        """The attribute that a statement of a branch sets: a weight, or modules."""
        before = {*self._found}
        super()._statement(stmt)
        match [name for name in self._found if name not in before]:
            case [name] if isinstance(self._found[name], Modules | Weight):
                return name
            case _:
                raise wrong(stmt, f"`{ast.unparse(stmt)}` depends on a rank's stages")

    def _attribute(self, call: ast.Call) -> Attribute:
        match call:
            case ast.Call(func=ast.Attribute(attr="ModuleDict"), args=[ast.DictComp() as each]):
                return self._modules_of_stages(call, each)
            case _:
                return super()._attribute(call)

    def _modules_of_stages(self, call: ast.Call, each: ast.DictComp) -> Modules:
        match each:
            case ast.DictComp(
                value=ast.Call(func=ast.Name(id=name)),
                generators=[
                    _,
                    ast.comprehension(iter=ast.Subscript(value=ast.Subscript(slice=ast.Constant(value=str(dim))))),
                ],
            ):
                mine = f"for stage in {STAGES} for i in LAYERS_OF_STAGE[{dim!r}][stage]"
                demand_same(call, f"nn.ModuleDict({{str(i): {name}(mesh) {mine}}})")
                for needed in ("nn", name, "LAYERS_OF_STAGE"):
                    self._names.demand(call, needed)
                return Modules(name, dim)
            case _:
                raise wrong(call, "is no module for each turn of this rank's stages")


def condition(held: tuple[int, ...]) -> str:
    """Whether a rank has one of these stages."""
    if len(held) == 1:
        return f"{held[0]} in {STAGES}"
    return f"{{{', '.join(map(str, held))}}} & {{*{STAGES}}}"
