"""Runs the text of a program on symbols: the whitelist of syntax is what has a method here, and
anything else an error.

Purpose: no part of the text is executed by Python: names are bound to terms, numbers and the text's
own classes, and a call makes a term.  Non-goals: statements (`execute`), what special names do
(`stubs`).
"""

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import cast

from .terms import Event, Log, Term, Terms, demand, frozen_key, wrong
from .values import Binding, Class, Frame, Instance, Modules

STEPS = 1_000_000
"""The most nodes that are run before a text is refused."""

BUILT_IN = frozenset(
    {"__file__", "float", "int", "len", "list", "range", "str", "super", "tuple", "zip"}
)
"""The names of Python's own that programs use."""

OPERATORS = {
    ast.Add: ("+", "add"),
    ast.Sub: ("-", "sub"),
    ast.Mult: ("*", "mul"),
    ast.Div: ("/", "truediv"),
    ast.FloorDiv: ("//", "floordiv"),
    ast.Mod: ("%", "mod"),
    ast.Pow: ("**", "pow"),
    ast.BitAnd: ("&", "and_"),
    ast.USub: ("neg", "neg"),
    ast.Invert: ("~", "invert"),
    ast.Eq: ("==", "eq"),
    ast.NotEq: ("!=", "ne"),
    ast.Lt: ("<", "lt"),
    ast.LtE: ("<=", "le"),
    ast.Gt: (">", "gt"),
    ast.GtE: (">=", "ge"),
    ast.In: ("in", "contains"),
}

Stub = Callable[["Evaluator", ast.Call, Sequence[object], dict[str, object]], object]


class Evaluator(ABC):
    """Runs expressions; `known` are the names of the module, `stubs` what of them does other
    than make a term.
    """

    built_in = BUILT_IN

    def __init__(self, terms: Terms, stubs: dict[str, Stub]) -> None:
        self.terms, self.stubs = terms, {terms.name(name): stub for name, stub in stubs.items()}
        self.module_names: dict[str, object] = {}
        self.log: Log = []
        self.recompute: object = None  # whether backward recomputes what is run now
        self.frame = Frame()
        self.at: dict[Term, ast.AST] = {}  # where the text computes a term first
        self.read: set[ast.AST] = set()  # the stores of local names that were read
        self._steps = 0

    def value(self, node: ast.expr) -> object:
        """The value of an expression."""
        self._steps += 1
        demand(node, self._steps < STEPS, "runs on and on")
        run = getattr(self, f"_{type(node).__name__}", None)
        if run is None:
            raise wrong(node, f"`{ast.unparse(node)}` is no part of a program")
        return run(node)

    def spec(self, text: str, **names: object) -> object:
        """The value of a text of the compiler's own, with these names bound."""
        bindings = {name: Binding(value) for name, value in names.items()}
        before, self.frame = self.frame, Frame(names=bindings, is_spec=True)
        try:
            return self.value(parse(text))
        finally:
            self.frame = before

    # ---- names

    def _Constant(self, node: ast.Constant) -> object:
        demand(
            node,
            isinstance(node.value, int | float | str | None),
            f"`{node.value!r}` is no part of a program",
        )
        return node.value

    def _Name(self, node: ast.Name) -> object:
        return self.bound(node).value

    def bound(self, node: ast.Name) -> Binding:
        """The value that a name is bound to."""
        if binding := self.frame.names.get(node.id):
            closed = binding.block is not None and binding.block.closed
            demand(node, self.frame.returns or not closed, f"`{node.id}` is read outside its block")
            if binding.store is not None:
                self.read.add(binding.store)
            return binding
        if self.frame.is_spec:
            return Binding(self.terms.name(node.id))
        demand(
            node, node.id not in self.frame.bound_names, f"`{node.id}` is read before it is bound"
        )
        if node.id in self.module_names:
            return Binding(self.module_names[node.id])
        demand(node, node.id in self.built_in, f"`{node.id}` is not imported or defined")
        return Binding(self.terms.name(node.id))

    def _Attribute(self, node: ast.Attribute) -> object:
        demand(node, not node.attr.startswith("_"), f"`{node.attr}` is not for programs")
        match self.value(node.value):
            case Instance(is_whole=True) as of:
                if node.attr not in of.attributes:
                    raise wrong(node, f"`{ast.unparse(node)}` is not set, or not on this stage")
                of.attributes_read.add(node.attr)
                return of.attributes[node.attr]
            case Instance() | Term() as of:
                return self.terms("attr", of, node.attr)
            case _:
                raise wrong(node, f"`{ast.unparse(node.value)}` has no `{node.attr}`")

    def _Subscript(self, node: ast.Subscript) -> object:
        container, key = self.value(node.value), self.value(node.slice)
        match container:
            case Term():
                return self.frame.cells.get(
                    (container, frozen_key(key)), self.terms("getitem", container, key)
                )
            case Modules(by_key):
                return self._module(node, by_key, key)
            case dict() | tuple() if isinstance(key, int | str):
                try:
                    return cast(dict[object, object], container)[key]
                except (KeyError, IndexError, TypeError):
                    raise wrong(node, f"there is no `{ast.unparse(node)}`") from None
            case _:
                raise wrong(node, f"`{ast.unparse(node.value)}` has no parts")

    def _module(self, node: ast.Subscript, by_key: dict[object, object], key: object) -> object:
        """The module of a layer, by its number as text: of all layers of a loop it is the same
        one.
        """
        match key:
            case Term(
                head="call",
                args=(
                    Term(head="name", args=("str",)),
                    (Term(head="index", args=(range() as of, _)),),
                    _,
                ),
            ):
                modules = {id(by_key.get(str(i))): by_key.get(str(i)) for i in of}
                demand(
                    node,
                    len(modules) == 1 and None not in modules.values(),
                    f"not all of {of} have a module",
                )
                return next(iter(modules.values()))
            case _:
                raise wrong(node, f"`{ast.unparse(node)}` is no layer's module")

    # ---- operators

    def operate(self, node: ast.AST, kind: type, *operands: object) -> object:
        """The result of an operator: a term of terms, and of numbers and sets what Python gives."""
        word, run = OPERATORS.get(kind, ("", ""))
        if not run:
            raise wrong(node, f"an operator `{kind.__name__}` is no part of a program")
        if not any(isinstance(operand, Term) for operand in operands):
            fits = all(isinstance(operand, int | float | set) for operand in operands) or word in (
                "in",
                "==",
            )
            fits = fits and (word != "**" or operands[1] in (0.5, -0.5))
            fits = fits or _repeats_tuple(word, operands)
            demand(node, fits, "computes with what are no numbers, or another power than a root")
            try:
                return getattr(operator, run)(*(operands[::-1] if word == "in" else operands))
            except (TypeError, ZeroDivisionError, OverflowError) as error:
                raise wrong(node, str(error)) from None
        if word == "-":  # a - b is a + (-b), and less a number is plus its negative
            left, right = operands
            negative = (
                -right if isinstance(right, int | float) else self.operate(node, ast.USub, right)
            )
            return self.operate(node, ast.Add, left, negative)
        term = self.terms(word, *operands)
        # a sign is part of what is added or returned
        return term if word == "neg" else self.log_term(node, term)

    def log_term(self, node: ast.AST, term: Term, block: bool = False) -> Term:
        """Logs what was computed; of a layer's number nothing is."""
        numbers = (
            term.head in ("%", "==")
            and isinstance(term.args[0], Term)
            and term.args[0].head in ("index", "%")
        )
        if not self.frame.is_spec:
            self.at.setdefault(term, node)
        self.log += [] if numbers else [Event(term, node, block, self.recompute)]
        return term

    def _BinOp(self, node: ast.BinOp) -> object:
        return self.operate(node, type(node.op), self.value(node.left), self.value(node.right))

    def _UnaryOp(self, node: ast.UnaryOp) -> object:
        return self.operate(node, type(node.op), self.value(node.operand))

    def _Compare(self, node: ast.Compare) -> object:
        left, holds = self.value(node.left), True
        for kind, right in zip(node.ops, map(self.value, node.comparators), strict=True):
            holds = self.operate(node, type(kind), left, right)
            if len(node.ops) > 1 and not isinstance(holds, bool):
                raise wrong(node, "compares several values at once")
            if not holds:
                break
            left = right
        return holds

    # ---- several values

    def several(self, nodes: Sequence[ast.expr]) -> Iterator[object]:
        """The values of expressions; an expression with a star gives its values one by one."""
        for node in nodes:
            if not isinstance(node, ast.Starred):
                yield self.value(node)
                continue
            match self.value(node.value):
                case Term() as term:
                    yield self.terms("star", term)
                case all_:
                    known = get_known_values(all_)
                    if known is None:
                        raise wrong(node, f"`{ast.unparse(node)}` are no values")
                    yield from known

    def _Tuple(self, node: ast.Tuple | ast.List) -> object:
        return tuple(self.several(node.elts))

    _List = _Tuple

    def _Set(self, node: ast.Set) -> object:
        elements = [*self.several(node.elts)]
        demand(
            node,
            all(isinstance(element, int) for element in elements),
            "is a set of what are no numbers",
        )
        return {*elements}

    def _Dict(self, node: ast.Dict) -> object:
        keys = [self.value(key) if key else None for key in node.keys]
        are_constants = all(isinstance(key, int | str) for key in keys) and len({*keys}) == len(
            keys
        )
        demand(node, are_constants, "has a key that is no number or word, or has it twice")
        return dict(zip(keys, map(self.value, node.values), strict=True))

    def _GeneratorExp(self, node: ast.GeneratorExp | ast.ListComp) -> object:
        return tuple(self.value(node.elt) for _ in self._layers(node, node.generators))

    _ListComp = _GeneratorExp

    def _DictComp(self, node: ast.DictComp) -> object:
        return {
            self.value(node.key): self.value(node.value)
            for _ in self._layers(node, node.generators)
        }

    def _layers(self, node: ast.expr, generators: Sequence[ast.comprehension]) -> Iterator[None]:
        """Binds the names of a comprehension to each of their values, as long as it runs."""
        if not generators:
            yield
            return
        first, *inner_generators = generators
        if first.ifs or first.is_async or not isinstance(first.target, ast.Name):
            raise wrong(node, f"`{ast.unparse(node)}` is no part of a program")
        all_, name = self.value(first.iter), first.target.id
        if not isinstance(all_, range | tuple):
            raise wrong(node, f"`{ast.unparse(first.iter)}` are not known")
        demand(
            node,
            name not in self.module_names and name not in self.built_in,
            f"`{name}` hides what the module calls so",
        )
        before = self.frame.names.get(name)
        for element in cast(tuple[object, ...], all_):
            self.frame.names[name] = Binding(element)
            yield from self._layers(node, inner_generators)
        self.frame.names.pop(name, None)
        if before:
            self.frame.names[name] = before

    # ---- calls

    def _Call(self, node: ast.Call) -> object:
        function, args = self.value(node.func), [*self.several(node.args)]
        options: dict[str, object] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise wrong(node, "gives keywords that are not written")
            options[keyword.arg] = self.value(keyword.value)
        return self.call(node, function, args, options)

    def call(
        self, node: ast.Call, function: object, args: Sequence[object], options: dict[str, object]
    ) -> object:
        """The result of a call: a module's or a class's of the text, else a term."""
        match function:
            case Term() if stub := self.stubs.get(function):
                return stub(self, node, args, options)
            case Term(head="attr", args=(Term(head="neg", args=(positive,)), "unsqueeze" as view)):
                return self.operate(
                    node,
                    ast.USub,
                    self.call(node, self.terms("attr", positive, view), args, options),
                )
            case Term(head="attr", args=(Instance() as of, str(name))):
                return self.register(node, of, name, args, options)
            case Term():
                return self.log_term(
                    node, self.terms("call", function, tuple(args), dict(sorted(options.items())))
                )
            case Class():
                demand(node, not options, "is given keywords")
                return self.instantiate(node, function, args)
            case Instance():
                demand(node, not options, "is given keywords")
                return self.forward(node, function, args)
            case _:
                raise wrong(node, f"`{ast.unparse(node.func)}` is nothing to call")

    @abstractmethod
    def register(
        self,
        node: ast.Call,
        module: Instance,
        name: str,
        args: Sequence[object],
        options: dict[str, object],
    ) -> object:
        """A call of a method of a module under construction."""
        ...

    @abstractmethod
    def instantiate(self, node: ast.AST, model_class: Class, args: Sequence[object]) -> object:
        """A module of a class."""
        ...

    @abstractmethod
    def forward(self, node: ast.AST, module: Instance, args: Sequence[object]) -> object:
        """The result of a module."""
        ...


def get_known_values(value: object) -> tuple[object, ...] | None:
    """The values of a tuple, a set or a range, unless they are too many; None if it is neither."""
    if isinstance(value, range):
        return (*value,) if len(value) < STEPS else None
    return (*cast(tuple[object, ...], value),) if isinstance(value, tuple | set) else None


def _repeats_tuple(word: str, operands: Sequence[object]) -> bool:
    """Whether an operator repeats the values of a tuple, `3 * (value,)`."""
    match word, operands:
        case "*", [int(times), tuple()]:
            return times * len(cast(tuple[object, ...], operands[1])) < STEPS
        case _:
            return False


@cache
def parse(text: str) -> ast.expr:
    """The expression of a text of the compiler's own."""
    return ast.parse(text, mode="eval").body
