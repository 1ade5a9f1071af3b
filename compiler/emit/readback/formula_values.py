"""Evaluates the formulas of the step's ops on numbers, and compares with what the ops' entries say
of these numbers.

Purpose: a second opinion on the texts, among them of infinity, of what is no number, and of counts
of 0.  A text that is a call of the op's own function is compared with the op's operands and
attributes.  Non-goals: which statements a step has, and in which order (`step`).
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import cast

from ...ir import Op, Type
from ...ops import OPS
from ...ops.line import Line, Value
from ..naming import DTYPES, literal
from ..step_formulas import fill, get_fields
from .evaluate import OPERATORS, parse

ROWS = 40
"""How many numbers each operand is."""

COUNTS, NUMBERS, TRUTHS = (0, 1, 3), (0.25, 0.5, 2.0, 3.0, math.inf, math.nan), (False, True)


def _clamp(x: float, min: float) -> float:
    return max(x, min)


def _reciprocal(x: float) -> float:
    return 1 / x if x else math.inf


def _cast(x: float, dtype: str) -> float:
    """The same number: `_compare_dtype` looks at the type."""
    return x


METHODS: dict[str, Callable[..., object]] = {
    "clamp": _clamp,
    "isfinite": math.isfinite,
    "isnan": math.isnan,
    "reciprocal": _reciprocal,
    "sqrt": math.sqrt,
    "to": _cast,
}
"""The methods of a tensor of one number."""


def compare_line(op: Op, line: Line, types: Sequence[Type], decided: bool) -> None:
    """Raises where a text of an op's line does something else than the op; `decided` is whether its
    first operand is a count with conditions, which a text reads as whether they hold.
    """
    limits = [value for _, value in op.attrs if isinstance(value, float)]
    numbers = [_numbers_of(type, limits) for type in types]
    if decided:
        numbers[0] = TRUTHS
    for formula in (line.formula, *line.conditions.values()):
        operands = [f"a{i}" for i in range(len(op.inputs))]
        text = fill(formula, op, get_fields(op, operands))
        if formula.value is None:
            _compare_call(op, text, operands)
            continue
        _compare_dtype(op, text)
        random = Random(0)
        for _ in range(ROWS):
            row = dict(zip(operands, map(random.choice, numbers), strict=True))
            _compare_values(op, formula.value, text, row)


def _numbers_of(type: Type, limits: Sequence[float]) -> Sequence[float]:
    """Numbers of a type, among them the op's attributes, which may be limits."""
    return COUNTS if type.dtype == "i64" else (*NUMBERS, *limits)


def _compare_values(op: Op, of_op: Value, text: str, row: Mapping[str, float]) -> None:
    wanted: object = cast(Callable[..., object], of_op)(*row.values())
    try:
        value = _evaluate(parse(text), row)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise AssertionError(f"emit: `{text}` of {op.kind}, of {row}: {error}") from None
    assert _are_alike(wanted, value), (
        f"emit: `{text}` of {op.kind} is {value} of {row}, and not {wanted}"
    )


def _compare_dtype(op: Op, text: str) -> None:
    """An op that has an element type casts to it, and no other casts."""
    wanted, dtypes = list[str](), list[str]()
    if dtype := dict(op.attrs).get("dtype"):
        wanted.append(DTYPES[str(dtype)])
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in DTYPES.values():
            dtypes.append(ast.unparse(node))
    assert dtypes == wanted, f"emit: `{text}` of {op.kind} does not cast to {', '.join(wanted)}"


def _compare_call(op: Op, text: str, operands: Sequence[str]) -> None:
    """The function has the op's name, and takes its operands and its attributes, in order."""
    node, wanted = parse(text), [*operands]
    for attribute in OPS[op.kind].attributes:
        wanted.append(ast.unparse(parse(literal(op.get(attribute.name)))))
    function, arguments = "", list[str]()
    if isinstance(node, ast.Call) and not node.keywords:
        function = ast.unparse(node.func).removeprefix("state.")
        arguments = [*map(ast.unparse, node.args)]
    assert (function, arguments) == (op.kind, wanted), (
        f"emit: `{text}` is no call of {op.kind} with {', '.join(wanted)}"
    )


def _evaluate(node: ast.expr, names: Mapping[str, float]) -> object:
    """The value of an expression of numbers by these names."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute():
            return ast.unparse(node)
        case ast.Call(func=ast.Attribute(value=x, attr=method)) if method in METHODS:
            arguments = [_evaluate(argument, names) for argument in node.args]
            options = {str(option.arg): _evaluate(option.value, names) for option in node.keywords}
            return METHODS[method](_evaluate(x, names), *arguments, **options)
        case _:
            operation, operands = _get_operation(node)
            return operation(*(_evaluate(operand, names) for operand in operands))


def _get_operation(node: ast.expr) -> tuple[Callable[..., object], list[ast.expr]]:
    """The function that an operator stands for, and what it is applied to."""
    match node:
        case ast.UnaryOp(op=ast.Invert(), operand=x):
            return operator.not_, [x]
        case ast.BinOp(left=x, op=sign, right=y):
            return _get_function(sign), [x, y]
        case ast.Compare(left=x, ops=[sign], comparators=[y]):
            return _get_function(sign), [x, y]
        case _:
            raise AssertionError(f"emit: nothing says what `{ast.unparse(node)}` is of numbers")


def _get_function(sign: ast.AST) -> Callable[..., object]:
    """The function that does what an operator of two operands does."""
    kind: type = type(sign)
    _, word = OPERATORS.get(kind, ("", ""))
    assert word, f"emit: nothing says what `{kind.__name__}` is of numbers"
    return getattr(operator, word)


def _are_alike(wanted: object, value: object) -> bool:
    """Whether a text's value is the wanted one: a truth is no number."""
    if isinstance(wanted, bool) or isinstance(value, bool):
        return wanted is value
    assert isinstance(wanted, int | float), f"emit: {wanted} is no number"
    assert isinstance(value, int | float), f"emit: {value} is no number"
    return math.isclose(wanted, value) or (math.isnan(wanted) and math.isnan(value))
