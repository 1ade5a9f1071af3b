"""The machine of the read-back for programs of torch alone: what their steps say besides, on
symbols too.

Non-goals: what runs models and layers (`emit.readback.machine`).
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from ...readback.evaluate import BUILT_IN, Evaluator, Stub
from ...readback.execute import NOTHING
from ...readback.machine import Machine
from ...readback.stubs import accessor
from ...readback.terms import Event, Log, Loop, Term, Terms, demand, frozen_key, wrong
from ...readback.values import Binding, Frame, Instance, Modules, Zip

METHODS = ("to", "parameters")
"""The methods of a model that a program calls when it builds it; the first gives the model."""


def _stage_layers(
    e: Evaluator, node: ast.Call, args: Sequence[object], options: dict[str, object]
) -> object:
    """The layers that a stage has of all, by number."""
    layers_by_repeat = cast(
        "dict[str, tuple[range, ...]]", e.module_names.get("LAYERS_OF_STAGE", {})
    )
    counts = {max(layers.stop for layers in ranges) for ranges in layers_by_repeat.values()}
    match args:
        case [Term(head="lambda", args=(Instance() as layer,)), int(count), range() as own] if (
            count in counts
        ):
            return Modules({str(number): layer for number in own})
        case _:
            raise wrong(node, "are no layers of a stage")


def _len(
    e: Evaluator, node: ast.Call, args: Sequence[object], options: dict[str, object]
) -> object:
    """The number of values that are known, or a term."""
    if len(args) == 1 and isinstance(args[0], tuple):
        return len(cast("tuple[object, ...]", args[0]))
    return accessor(e, node, args, options)


EFFECTLESS = (
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "Partial",
    "Replicate",
    "Shard",
    "enumerate",
    "max",
    "min",
)
"""Names that programs of torch alone use without effects: a word each."""

STUBS: dict[str, Stub] = {
    **dict.fromkeys(EFFECTLESS, accessor),
    "len": _len,
    "stage_layers": _stage_layers,
}
"""The names that do more than make a term: a row each."""


class TorchMachine(Machine):
    """Runs the text of one program; a choice that only a run makes is run once, as a loop is."""

    built_in = BUILT_IN | {"enumerate", "max", "min"}

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self.stubs |= {terms.name(name): stub for name, stub in STUBS.items()}
        self._lists = 0
        self.compared: set[ast.AST] = set()  # types that are those of the plan, word for word

    def demand_fits(self, annotation: ast.expr | None, value: object, node: ast.AST) -> None:
        """Raises where a value is not of the type that a header says."""
        if annotation not in self.compared:
            super().demand_fits(annotation, value, node)

    def run_with_log(self, run: Callable[[], object]) -> tuple[Log, object]:
        """The log of what runs alone, whose loops count from 1, and its result."""
        outer, self.log, self._loops, self._lists = self.log, [], 0, 0
        result = run()
        log, self.log = self.log, outer
        return log, result

    def run_expected(self, body: Sequence[ast.stmt], names: Mapping[str, object]) -> object:
        """The result of statements of the compiler's own."""
        visible = self.module_names | {**names}
        bindings = {name: Binding(value) for name, value in visible.items()}
        before, self.frame = self.frame, Frame(names=bindings, is_spec=True)
        result = self.run(body)
        self.frame = before
        return result

    # ---- expressions

    def call(
        self, node: ast.Call, function: object, args: Sequence[object], options: dict[str, object]
    ) -> object:
        """The result of a call: of a copy, the value itself."""
        match function:
            case Term(head="attr", args=(Term() as of, "clone")) if not args and not options:
                return of
            case _:
                return super().call(node, function, args, options)

    def _Compare(self, node: ast.Compare) -> object:
        match node:
            case ast.Compare(left=left, ops=[ast.NotIn()], comparators=[several]):
                inside = self.operate(node, ast.In, self.value(left), self.value(several))
                demand(
                    node,
                    isinstance(inside, bool),
                    f"`{ast.unparse(node)}` is not known before it runs",
                )
                return not inside
            case _:
                return super()._Compare(node)

    def _BoolOp(self, node: ast.BoolOp) -> object:
        return self.terms(type(node.op).__name__, *map(self.value, node.values))

    def _Lambda(self, node: ast.Lambda) -> object:
        """A module that is made as often as it is called, or a function with some constants
        after its operands.
        """
        if not ast.unparse(node.args):
            return self.terms("lambda", self.value(node.body))
        match node.body:
            case ast.Call(
                func=function, args=[ast.Starred(ast.Name(id=name)), *constants], keywords=[]
            ) if node.args.vararg and ast.unparse(node.args) == f"*{name}":
                return self.terms("lambda", self.value(function), tuple(map(self.value, constants)))
            case _:
                raise wrong(node, f"`{ast.unparse(node)}` is no part of a program")

    def _List(self, node: ast.List) -> object:
        """A new list that a step appends to, or several values."""
        if node.elts:
            return self._Tuple(node)
        self._lists += 1
        return self.terms("list", self._lists)

    def _ListComp(self, node: ast.ListComp) -> object:
        """Several values, each made by one run of the expression."""
        if isinstance(self.value(node.generators[0].iter), range | tuple):
            return self._GeneratorExp(node)
        before = dict(self.frame.names)
        domains: list[object] = []
        for depth, generator in enumerate(node.generators):
            domains.append(self._domain(generator, depth))
        term = self.terms("map", self.value(node.elt), tuple(domains))
        self.frame.names = before
        return term

    def _domain(self, generator: ast.comprehension, depth: int) -> object:
        """The values that a name runs over, which it has one of from here on."""
        demand(generator.iter, not generator.is_async, "is more than a list of values")
        values, symbol = self.value(generator.iter), self.terms("loop", f"values {depth}")
        match values:
            case Modules(by_key):
                are_alike = len({*by_key.values()}) == 1
                demand(generator.iter, are_alike, "are modules that are not all alike")
                element = next(iter(by_key.values()))
            case Zip(domains):
                element = tuple(self.terms("each", domain, symbol) for domain in domains)
            case _:
                element = self.terms("each", values, symbol)
        self._bind(generator.target, element)
        return values, tuple(map(self.value, generator.ifs))

    def _Attribute(self, node: ast.Attribute) -> object:
        if node.attr in METHODS and isinstance(module := self.value(node.value), Instance):
            return self.terms("attr", module, node.attr)
        return super()._Attribute(node)

    def demand_header(self, function: ast.FunctionDef) -> None:
        """Raises where a header is more than names and types, and what a stage is given, by
        name but for values.
        """
        if function.args.vararg is None:
            super().demand_header(function)
            return
        args = function.args
        has_defaults = bool(args.defaults) or any(args.kw_defaults)
        has_others = bool(args.kwarg or args.posonlyargs or args.args[1:])
        is_plain = not (has_defaults or has_others)
        demand(function, is_plain, f"the header of `{function.name}` is more than names and types")

    def register(
        self,
        node: ast.Call,
        module: Instance,
        name: str,
        args: Sequence[object],
        options: dict[str, object],
    ) -> object:
        """A method of a module under construction, or of the model that has been built."""
        if name not in METHODS:
            return super().register(node, module, name, args, options)
        term = self.terms("call", self.terms("attr", module, name), tuple(args), options)
        self.log_term(node, term)
        return module if name == METHODS[0] else term

    def parts(self, node: ast.AST, value: object, count: int) -> "list[object]":
        """The values of a value that is several; one of them may be several too."""
        if isinstance(value, Term) and value.head == "item":
            return [self.terms("item", value, i, count) for i in range(count)]
        return [*super().parts(node, value, count)]

    # ---- statements

    def _do_Delete(self, stmt: ast.Delete) -> object:
        """Takes away weights that a stage does not have."""
        for target in stmt.targets:
            module, name = self._attribute_of_self(target)
            if module is None or name not in module.attributes or module.is_whole:
                raise wrong(stmt, f"`{ast.unparse(stmt)}` takes away no weight")
            self._forget(module.attributes.pop(name))
        return NOTHING

    def _attribute_of_self(self, target: ast.expr) -> tuple[Instance | None, str]:
        """The module under construction and the name of its attribute, if a target is one."""
        match target:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                module = self.frame.names["self"].value
                return (module if isinstance(module, Instance) else None), name
            case _:
                return None, ""

    def _forget(self, value: object) -> None:
        """Takes what made a value out of the log."""
        log: Log = []
        for entry in self.log:
            if not (isinstance(entry, Event) and entry.term is value):
                log.append(entry)
        self.log = log

    def _do_AnnAssign(self, stmt: ast.AnnAssign) -> object:
        plain = (
            isinstance(stmt.target, ast.Name)
            and stmt.value
            and ast.unparse(stmt.annotation) == "list[Tensor]"
        )
        demand(stmt, bool(plain), "says another type than that of a list of tensors")
        self._bind(stmt.target, self.value(cast(ast.expr, stmt.value)))
        return NOTHING

    def _do_If(self, stmt: ast.If) -> object:
        """A choice that the compiler knows, or one of a run, after which comes what it does not
        do.
        """
        test = self.value(stmt.test)
        if not isinstance(test, Term):
            return super()._do_If(stmt)
        demand(stmt, not stmt.orelse, "does something else where it does not hold")
        choice = Loop(cast(ast.For, stmt), self.terms("if", test), (test,))
        self.log.append(choice)
        outer, self.log = self.log, choice.log
        result = self.run(stmt.body)
        if result is not NOTHING:
            self.log_term(stmt, self.terms("return", result))
        self.log = outer
        return NOTHING


Step = tuple[ast.AST, object]


def steps(log: Log) -> Iterator[Step]:
    """Everything that a log has, in order, each with its place."""
    for entry in log:
        if isinstance(entry, Event):
            yield entry.node, entry.term
        else:
            yield entry.node, frozen_key((entry.symbol, entry.domains))
            yield from steps(entry.log)
            yield entry.node, "end"
