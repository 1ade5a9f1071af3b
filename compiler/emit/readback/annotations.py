"""The types that functions say of their arguments and results, and whether values are of these.

Non-goals: values (`evaluate`).
"""

import ast
from typing import TYPE_CHECKING, cast

from .terms import Term, demand, wrong

if TYPE_CHECKING:
    from .evaluate import Evaluator

Values = tuple[object, ...]

NAMES = {
    *(
        "Batch",
        "DeviceMesh",
        "FlatParamGroup",
        "FlatParams",
        "Mesh",
        "Metrics",
        "Tensor",
        "TrainState",
        "nn.Module",
    ),
    *("float", "int"),
}


NOTHING = "nothing"
"""The value that enters the first stage of a pipeline, of any type."""


def types_of(function: ast.FunctionDef) -> None:
    """Raises where the header of a function is more than names and types."""
    args = function.args
    plain = not (
        args.defaults
        or args.kw_defaults
        or args.vararg
        or args.kwarg
        or args.kwonlyargs
        or args.posonlyargs
    )
    demand(function, plain, f"the header of `{function.name}` is more than names and types")
    names = [arg.arg for arg in args.args]
    demand(
        function,
        not any(name.startswith("_") for name in names),
        "has an argument that is not for programs",
    )


def demand_type(
    machine: "Evaluator", annotation: ast.expr | None, value: object, node: ast.AST
) -> None:
    """Raises where a value is not of the type that is said of it."""
    if annotation is None:
        raise wrong(node, "does not say what it takes and gives")
    holds = _fits(machine, annotation, value) or value is machine.terms.name(NOTHING)
    if not holds:
        raise wrong(node, f"{value} is no `{ast.unparse(annotation)}`")


def _fits(machine: "Evaluator", annotation: ast.expr, value: object) -> bool:
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return any([_fits(machine, left, value), _fits(machine, right, value)])
        case ast.Subscript(
            value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[one, ast.Constant(value=rest)])
        ) if rest is ...:
            return isinstance(value, tuple) and all(
                _fits(machine, one, element) for element in cast(Values, value)
            )
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=several)):
            values = cast(Values, value) if isinstance(value, tuple) else ()
            pairs = zip(several, values, strict=False)
            return len(values) == len(several) and all(
                _fits(machine, one, inner_value) for one, inner_value in pairs
            )
        case ast.Subscript(value=ast.Name(id="list"), slice=one):
            return _fits(machine, one, value)
        case ast.Name() | ast.Attribute():
            return _is(machine, annotation, value)
        case _:
            raise wrong(annotation, f"`{ast.unparse(annotation)}` is no type")


def _is(machine: "Evaluator", annotation: ast.expr, value: object) -> bool:
    name = ast.unparse(annotation)
    demand(annotation, name in NAMES, f"`{name}` is no type")
    if name not in ("float", "int"):
        demand(
            annotation, name.partition(".")[0] in machine.module_names, f"`{name}` is not imported"
        )
    match name:
        case "int":
            return type(value) is int
        case "FlatParams" | "FlatParamGroup":
            return isinstance(value, Term) and _of_buckets(value)
        case "Tensor":
            return isinstance(value, Term) and not _of_buckets(value)
        case _:
            return value is not None and not isinstance(value, tuple)


def _of_buckets(term: Term) -> bool:
    """Whether it is the flat parameters of layers, or some of them."""
    while term.head in ("each", "getitem") and isinstance(term.args[0], Term):
        term = term.args[0]
    return term.head == "name" and term.args[0] == "flat_params"
