"""Runs statements and functions of a program's text on symbols; a loop is run once, for all of its
layers.

Purpose: what every statement binds, logs and returns, and which ones were run.
Non-goals: expressions (`evaluate`), classes (`machine`).
"""

import ast
from collections.abc import Callable, Sequence
from typing import cast

from .annotations import demand_type
from .evaluate import Evaluator
from .stubs import METHODS, STUBS
from .terms import Loop, Term, Terms, demand, frozen_key, wrong
from .values import Binding, Block, Class, Frame, Instance, Modules, Zip

NOTHING = object()
"""The result of a body that does not return."""


class Statements(Evaluator):
    """Runs statements and functions."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms, STUBS)
        for (owner_text, name), stub in METHODS.items():
            owner = self.spec(owner_text)
            self.stubs[terms("attr", owner, name)] = stub
        self.ran: set[ast.AST] = set()
        self.last = Frame()  # that of the function that was run last
        self.set_at: dict[tuple[Instance, str], ast.AST] = {}
        self.entered: set[ast.AST] = set()  # functions
        self.classes: list[Class] = []
        self._running: set[ast.AST] = set()
        self._own: dict[ast.AST, frozenset[str]] = {}
        self._instances: dict[object, Instance] = {}
        self._loops = 0

    # ---- bodies

    def run(self, body: Sequence[ast.stmt]) -> object:
        """Runs statements; gives what is returned."""
        for stmt in body:
            self._steps += 1
            self.ran.add(stmt)
            statement = getattr(self, f"_do_{type(stmt).__name__}", None)
            if statement is None:
                raise wrong(stmt, f"`{ast.unparse(stmt)}` is no part of a program")
            if (result := statement(stmt)) is not NOTHING:
                return result
        return NOTHING

    def function(
        self, node: ast.FunctionDef, args: Sequence[object], module: Instance | None = None
    ) -> object:
        """Runs a function; the types of what it takes and gives are those that it says."""
        demand(node, node not in self._running, f"`{node.name}` runs itself")
        self.entered.add(node)
        self._running.add(node)
        several = node.args.vararg
        parameters, before = (
            [*node.args.args, *([several] if several else []), *node.args.kwonlyargs],
            self.frame,
        )
        demand(
            node,
            len(parameters) == len(args),
            f"takes {len(parameters)} arguments, is given {len(args)}",
        )
        own_names = self._own.get(node) or self._own.setdefault(node, _own(node))
        self.frame = Frame(
            own_names, {p.arg: Binding(value) for p, value in zip(parameters, args, strict=True)}
        )
        self._demand_free(node)
        for parameter, value in zip(parameters, args, strict=True):
            for argument in cast(tuple[object, ...], value) if parameter is several else (value,):
                if argument is not module or module is None:
                    self.demand_fits(parameter.annotation, argument, parameter)
        try:
            returned_value = self.run(body_of(node))
        finally:
            self.last, self.frame = self.frame, before
            self._running.discard(node)
        result = None if returned_value is NOTHING else returned_value
        self.demand_fits(node.returns, result, node)
        return result

    def demand_fits(self, annotation: ast.expr | None, value: object, node: ast.AST) -> None:
        """Raises where a value is not of the type that a header says."""
        demand_type(self, annotation, value, node)

    def _demand_free(self, node: ast.FunctionDef) -> None:
        taken = self.frame.bound_names & ({*self.module_names} | self.built_in | {"torch", "nn"})
        demand(node, not taken, f"{', '.join(sorted(taken))} hides what the module calls so")

    # ---- statements

    def _do_Assign(self, stmt: ast.Assign) -> object:
        demand(stmt, len(stmt.targets) == 1, "assigns twice")
        (target,) = stmt.targets
        value = self.value(stmt.value)
        if isinstance(target, ast.Tuple) and isinstance(stmt.value, ast.Tuple):
            demand(stmt, len(target.elts) == len(stmt.value.elts), "assigns unevenly")
            blocks = [self._block_of(element) for element in stmt.value.elts]
            for inner_target, part, block in zip(
                target.elts, self.parts(stmt, value, len(blocks)), blocks, strict=True
            ):
                self._bind(inner_target, part, block)
            return NOTHING
        self._bind(target, value, self._block_of(stmt.value))
        return NOTHING

    def _block_of(self, node: ast.expr) -> Block | None:
        """The block of what a name alone, or a recomputed op is bound to."""
        if isinstance(node, ast.Name):
            return self.bound(node).block
        match node:
            case ast.Call(
                func=ast.Name(id="recomputed"), args=[ast.Name() | ast.Attribute() as function, *_]
            ):
                return None if isinstance(self.value(function), Instance) else Block(closed=True)
            case ast.Call(func=ast.Attribute(value=ast.Name() as viewed, attr="unflatten")):
                return self.bound(viewed).block
            case _:
                return None

    def _bind(self, target: ast.expr, value: object, block: Block | None = None) -> None:
        match target:
            case ast.Name(id=name):
                self.frame.names[name] = Binding(value, target, block)
            case ast.Tuple(elts=elements):
                names = [
                    element.id
                    for element in elements
                    if isinstance(element, ast.Name) and element.id != "_"
                ]
                demand(target, len({*names}) == len(names), "binds a name twice")
                for inner_target, part in zip(
                    elements, self.parts(target, value, len(elements)), strict=True
                ):
                    self._bind(inner_target, part, block)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                module = self.frame.names["self"].value
                if not isinstance(module, Instance) or module.is_whole:
                    raise wrong(target, "sets an attribute when it runs")
                self._set(target, module, name, value)
            case ast.Subscript():
                container, key = self.value(target.value), self.value(target.slice)
                demand(
                    target,
                    isinstance(container, Term),
                    "sets a part of what is none of the state's",
                )
                self.frame.cells[container, frozen_key(key)] = value
            case _:
                raise wrong(target, f"cannot assign to `{ast.unparse(target)}`")

    def _set(self, node: ast.AST, module: Instance, name: str, value: object) -> None:
        """Sets an attribute, which has one value."""
        demand(
            node,
            name not in module.attributes and not name.startswith("_"),
            f"sets `self.{name}` twice",
        )
        module.attributes[name], self.set_at[module, name] = value, node

    def parts(self, node: ast.AST, value: object, count: int) -> Sequence[object]:
        """The values of a value that is several."""
        match value:
            case Term(head="call" | "each"):
                if isinstance(function := value.args[0], Term) and function.head == "name":
                    self.log_term(node, self.terms("unpack", value, count))
                return [self.terms("item", value, i, count) for i in range(count)]
            case tuple() if len(several := cast(tuple[object, ...], value)) == count:
                return several
            case _:
                raise wrong(node, f"there are no {count} values for {count} names")

    def _do_AugAssign(self, stmt: ast.AugAssign) -> object:
        if not (isinstance(stmt.op, ast.Add) and isinstance(stmt.target, ast.Name)):
            raise wrong(stmt, "changes a value in place")
        before, more = (
            self.value(ast.copy_location(ast.Name(stmt.target.id), stmt)),
            self.value(stmt.value),
        )
        demand(stmt, isinstance(before, Term), "changes what is no value of the step")
        self.frame.names[stmt.target.id] = Binding(
            self.log_term(stmt, self.terms("+=", before, more)), stmt.target
        )
        return NOTHING

    def _do_Expr(self, stmt: ast.Expr) -> object:
        if not isinstance(stmt.value, ast.Call):
            raise wrong(stmt, f"`{ast.unparse(stmt)}` does nothing")
        if not any(
            stmt is body_of(model_class.init)[0] for model_class in self.classes
        ):  # `super().__init__()`
            self.value(stmt.value)
        return NOTHING

    def _do_Return(self, stmt: ast.Return) -> object:
        self.frame.returns = True
        return self.value(stmt.value) if stmt.value else None

    def _do_If(self, stmt: ast.If) -> object:
        test = self.value(stmt.test)
        demand(
            stmt,
            isinstance(test, bool | set),
            f"`{ast.unparse(stmt.test)}` is not known before it runs",
        )
        return self.run(stmt.body if test else stmt.orelse)

    def _do_With(self, stmt: ast.With) -> object:
        match stmt.items:
            case [
                ast.withitem(
                    ast.Call(func=ast.Name(id="regather" | "recompute")) as call,
                    ast.Name() | ast.Tuple() as names,
                )
            ]:
                block = Block()
                self._bind(names, self.value(call), block)
                result = self.run(stmt.body)
                demand(stmt, result is NOTHING, "returns from a block")
                block.closed = True
                return NOTHING
            case _:
                raise wrong(stmt, "opens a block other than `regather` or `recompute`")

    # ---- loops

    def _do_For(self, stmt: ast.For) -> object:
        demand(stmt, not stmt.orelse, "does something after the loop")
        all_ = self.value(stmt.iter)
        if isinstance(all_, range) and not all_:
            return NOTHING  # a stage without layers
        domains = all_.domains if isinstance(all_, Zip) else (all_,)
        self._loops += 1
        loop = Loop(stmt, self.terms("loop", self._loops), domains)
        self._enter(stmt, loop, isinstance(all_, Zip))
        outer, self.log = self.log, loop.log
        result = self.run(stmt.body)
        self.log = outer
        demand(stmt, result is NOTHING, "returns from a loop")
        self._leave(loop)
        self.log.append(loop)
        return NOTHING

    def _enter(self, stmt: ast.For, loop: Loop, zipped: bool) -> None:
        """Binds what a layer has of its own, and what it carries."""
        names = self.frame.names
        targets = _names_bound_in([stmt.target])
        for name in dict.fromkeys(sorted(_names_bound_in(stmt.body), key=_first(stmt))):
            if name in names and name not in targets:
                if (store := names[name].store) is not None:
                    self.read.add(store)
                loop.begin[name], loop.carried[name] = (
                    names[name].value,
                    self.terms("carried", loop.symbol, name),
                )
                names[name] = Binding(loop.carried[name])
        elements = [self._each(stmt, domain, loop.symbol) for domain in loop.domains]
        self._bind(stmt.target, tuple(elements) if zipped else elements[0])

    def _each(self, stmt: ast.For, domain: object, symbol: Term) -> object:
        match domain:
            case Modules(by_key):
                modules = {*by_key.values()}
                demand(stmt, len(modules) == 1, "runs modules that are not all alike")
                return next(iter(modules))
            case range():
                return self.terms("index", domain, symbol)
            case _ if isinstance(domain, Term | tuple):
                return self.terms("each", cast(object, domain), symbol)
            case _:
                raise wrong(stmt, f"`{ast.unparse(stmt.iter)}` are no modules")

    def _leave(self, loop: Loop) -> None:
        """After a loop only the values it carries have names."""
        names = self.frame.names
        for name in _names_bound_in(loop.node.body) | _names_bound_in([loop.node.target]):
            end = names.pop(name, None)
            if end and end.store is not None and name in loop.carried:
                self.read.add(end.store)
            if end and name in loop.carried:
                loop.end[name], loop.after[name] = end.value, self.terms("after", loop.symbol, name)
                names[name] = Binding(loop.after[name])


def body_of(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> list[ast.stmt]:
    """The body without its docstring."""
    return node.body[ast.get_docstring(node, clean=False) is not None :]


def _names_bound_in(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that statements or targets bind."""
    every = (node for top in nodes for node in ast.walk(top))
    return {
        node.id for node in every if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _own(node: ast.FunctionDef) -> frozenset[str]:
    args = node.args
    several = [args.vararg] if args.vararg else []
    return frozenset(
        _names_bound_in(node.body)
        | {parameter.arg for parameter in (*args.args, *several, *args.kwonlyargs)}
    )


def _first(loop: ast.For) -> Callable[[str], int]:
    """Sorts names as the line binds them that binds the most: that of the module's call."""
    order = [
        node.id
        for stmt in sorted(loop.body, key=lambda stmt: -len(_names_bound_in([stmt])))
        for node in ast.walk(stmt)
        if isinstance(node, ast.Name)
    ]
    return order.index
