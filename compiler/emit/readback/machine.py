"""Runs a whole text on symbols: its functions, its classes, and the modules that these make.

Purpose: modules of one class that are made alike are one object, and each statement and name must
have been of use.  Non-goals: statements (`execute`), expressions (`evaluate`).
"""

import ast
from collections.abc import Sequence

from .annotations import types_of
from .execute import NOTHING, Statements, body_of
from .terms import Event, Term, demand, frozen_key, within, wrong
from .values import Class, Function, Instance


class Machine(Statements):
    """Runs the text of one program."""

    def instantiate(self, node: ast.AST, model_class: Class, args: Sequence[object]) -> Instance:
        """A module of a class; calls with the same arguments give one module."""
        key = (model_class, *map(frozen_key, args))
        if key not in self._instances:
            module = Instance(model_class)
            outer, self.log = self.log, []
            self.function(model_class.init, [module, *args], module)
            used, (log, self.log) = within([*module.attributes.values()]), (self.log, outer)
            for event in log:
                is_used = isinstance(event, Event) and event.term in used
                demand(event.node, is_used, f"nothing uses `{ast.unparse(event.node)}`")
            module.is_whole = True
            self._instances[key] = module
        return self._instances[key]

    def forward(self, node: ast.AST, module: Instance, args: Sequence[object]) -> object:
        """The result of a module."""
        return self.function(module.class_of_module.forward, [module, *args], module)

    def register(
        self,
        node: ast.Call,
        module: Instance,
        name: str,
        args: Sequence[object],
        options: dict[str, object],
    ) -> object:
        """`register_buffer` of a table that is computed when a program starts, or of biases,
        zeros at first.
        """
        match name, args, options:
            case "register_buffer", [str(attribute), value], _ if options == self._of_buffer(value):
                self._set(node, module, attribute, value)
                return None
            case _:
                raise wrong(node, f"`{ast.unparse(node)}` declares nothing")

    def _of_buffer(self, value: object) -> dict[str, object]:
        """Attributes of a buffer: biases are saved with the state, tables are not."""
        is_bias = (
            isinstance(value, Term)
            and value.head == "call"
            and value.args[0] is self.spec("torch.zeros")
        )
        return {} if is_bias else {"persistent": False}

    def _do_FunctionDef(self, stmt: ast.FunctionDef) -> object:
        self.define(stmt, stmt.name, Function(stmt))
        return NOTHING

    def _do_ClassDef(self, stmt: ast.ClassDef) -> object:
        demand(stmt, [*map(ast.unparse, stmt.bases)] == ["nn.Module"], "is no module")
        demand(stmt, not stmt.keywords and not stmt.decorator_list, "has keywords or decorators")
        match body_of(stmt):
            case [
                ast.FunctionDef(name="__init__") as init,
                ast.FunctionDef(name="forward") as forward,
            ]:
                self.ran |= {init, forward}
                first = ast.unparse(body_of(init)[0])
                demand(
                    init, first == "super().__init__()", f"`{first}` should be `super().__init__()`"
                )
                for method in (init, forward):
                    demand(method, not method.decorator_list, "is decorated")
                    self.demand_header(method)
                self.classes.append(Class(stmt, init, forward))
                self.define(stmt, stmt.name, self.classes[-1])
            case _:
                raise wrong(stmt, "is more or less than `__init__` and `forward`")
        return NOTHING

    def demand_header(self, function: ast.FunctionDef) -> None:
        """Raises where the header of a module's function is more than names and types."""
        types_of(function)

    def define(self, node: ast.AST, name: str, value: object) -> None:
        """Binds a name of the module, once."""
        demand(node, name not in self.module_names, f"binds `{name}` twice")
        demand(node, name not in self.built_in, f"hides Python's `{name}`")
        self.module_names[name] = value

    # ---- what was not run

    def demand_all(self, tree: ast.Module) -> None:
        """Raises for a statement that nothing ran, and a local name that nothing read."""
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            demand(function, function in self.entered, f"nothing runs `{function.name}`")
            for stmt in body_of(function):
                for node in ast.walk(stmt):
                    if isinstance(node, ast.stmt) and node not in self.ran:
                        raise wrong(node, f"nothing runs `{ast.unparse(node)}`")
                    if isinstance(node, ast.Assign):
                        self._demand_read(node)

    def _demand_read(self, stmt: ast.Assign) -> None:
        """An assignment of several results may leave some of them unread."""
        (target,) = stmt.targets
        names = [
            node
            for node in ast.walk(target)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        if names and not any(name in self.read for name in names):
            raise wrong(stmt, f"nothing reads `{ast.unparse(target)}`")
