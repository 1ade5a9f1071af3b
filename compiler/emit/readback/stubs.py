"""Names in the text of a program that do more than make a term: loops, blocks, modules, changes in
place.

Non-goals: all other functions, which are terms by their names.
"""

import ast
from collections.abc import Sequence
from typing import cast

from .evaluate import Evaluator, Stub, get_known_values
from .terms import Term, demand, frozen_key, wrong
from .values import Binding, Instance, Modules, Zip

Options = dict[str, object]

OPERATORS = {"torch.mul": "*"}
"""Functions that do what an operator of Python does."""


def _range(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    numbers = [number for number in args if type(number) is int]
    demand(
        node,
        len(numbers) == len(args) and 1 <= len(args) <= 3 and 0 not in numbers[2:] and not options,
        "is no range of numbers",
    )
    return range(*numbers)


def _tuple(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    values = get_known_values(args[0]) if len(args) == 1 and not options else None
    if values is None:
        raise wrong(node, "is no tuple of known values")
    return values


def _zip(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    demand(node, options == {"strict": True} and len(args) > 1, "does not zip as many as there are")
    return Zip(tuple(args))


def _str(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    match args:
        case [int(number)]:
            return str(number)
        case [Term(head="index")]:
            return e.terms("call", e.terms.name("str"), tuple(args), {})
        case _:
            raise wrong(node, "is no layer's number")


def _recompute(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    """A function's result that only a block has, and that backward recomputes."""
    function, *operands = args
    demand(node, isinstance(function, Term), "recomputes no function")
    # its method
    if isinstance(function, Term) and operands and function.args[:1] == (e.terms.name("DTensor"),):
        function = e.terms("attr", operands.pop(0), function.args[1])
    if (sign := OPERATORS.get(str(function))) and not options:
        return e.log_term(node, e.terms(sign, *operands), block=True)
    return e.log_term(
        node, e.terms("call", function, tuple(operands), dict(sorted(options.items()))), block=True
    )


def _recompute_module(
    e: Evaluator, node: ast.Call, args: Sequence[object], options: Options
) -> object:
    """The same of a module, which backward recomputes whole; `enabled` says in which layers it
    does.
    """
    demand(node, bool(args), "recomputes nothing")
    if not isinstance(args[0], Instance):
        return _recompute(e, node, args, options)
    demand(
        node,
        {*options} <= {"enabled"} and e.recompute is None,
        "recomputes otherwise than a module",
    )
    e.recompute = options.get("enabled", True)
    result = e.forward(node, args[0], args[1:])
    e.recompute = None
    return result


def _regather(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    return _recompute(e, node, [e.terms.name("all_gather"), *args], options)


def _in_place(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    """The result of a call in place: all names of the value are the result's from now on."""
    before, after = (
        args[0] if args else None,
        e.terms("call", e.value(node.func), tuple(args), options),
    )
    e.frame.names |= {
        name: Binding(after, binding.store)
        for name, binding in e.frame.names.items()
        if binding.value is before
    }
    e.frame.cells |= {key: after for key, cell in e.frame.cells.items() if cell is before}
    if isinstance(before, Term) and before.head == "getitem":
        e.frame.cells.setdefault((before.args[0], frozen_key(before.args[1])), after)
    return e.log_term(node, after)


def accessor(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    """A call without effects, so that it does not matter how often it is made."""
    return e.terms("call", e.value(node.func), tuple(args), dict(sorted(options.items())))


def _module_list(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    demand(node, len(args) == 1, "is no list of modules")
    return _modules(
        node,
        dict(enumerate(cast(tuple[object, ...], args[0]))) if isinstance(args[0], tuple) else {},
    )


def _module_dict(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    demand(node, len(args) == 1, "is no dict of modules")
    return _modules(
        node, cast(dict[object, object], args[0]) if isinstance(args[0], dict) else {None: None}
    )


def _modules(node: ast.Call, by_key: dict[object, object]) -> Modules:
    fits = (
        len(node.args) == 1
        and not node.keywords
        and all(isinstance(module, Instance) for module in by_key.values())
    )
    demand(node, fits, "is no list or dict of modules")
    return Modules(dict(by_key))


def _table(e: Evaluator, node: ast.Call, args: Sequence[object], options: Options) -> object:
    """Rotary positions, whose base may be written as a whole number."""
    if isinstance(theta := options.get("theta"), int):
        options = options | {"theta": float(theta)}
    return accessor(e, node, args, options)


STUBS: dict[str, Stub] = {
    "range": _range,
    "tuple": _tuple,
    "zip": _zip,
    "str": _str,
    "len": accessor,
    "recompute": _recompute,
    "recomputed": _recompute_module,
    "regather": _regather,
    "all_reduce_": _in_place,
    "all_gather_": _in_place,
    "rope_frequencies": _table,
    "Experts": accessor,
    "Positions": accessor,
    "position_ids": accessor,
}
"""By the names that the text imports, or Python's own."""

METHODS: dict[tuple[str, str], Stub] = {
    ("nn", "ModuleList"): _module_list,
    ("nn", "ModuleDict"): _module_dict,
    ("mesh", "axis"): accessor,
    ("mesh", "among"): accessor,
    ("state.mesh", "axis"): accessor,
    ("state.mesh", "among"): accessor,
}
"""By what has them."""
