"""Arithmetic on dims and constants: the only computing that a plan does."""

import math
from collections.abc import Mapping
from fractions import Fraction

from ..config.values import help_for_digits
from ..syntax import tree
from ..syntax.diagnostics import did_you_mean, wrong
from .other_names import help_for_value

LARGEST = 2**48
"""The largest dim; parameter counts of such dims still fit 64 bits."""

Scalar = int | float | Fraction


def evaluate(expr: tree.Expr, scope: Mapping[str, Scalar]) -> Scalar:
    """The value of `expr`, with names from `scope`; divisions of whole numbers stay exact.

    Raises PlanError.
    """
    match expr:
        case tree.Number(value, ""):
            return value
        case tree.Name(name) if name in scope:
            return scope[name]
        case tree.Negative(inner):
            return -evaluate(inner, scope)
        case tree.Binary():  # chains nest deep on the left
            value = evaluate(expr.links[0].left, scope)
            for link in expr.links:
                value = apply(link, value, evaluate(link.right, scope))
            return value
        case tree.Call(tree.Name("sqrt"), (inner,), ()):
            if (value := evaluate(inner, scope)) < 0:
                raise wrong(
                    "E0302", "the root of a negative number", expr.span, f"of {float(value):g}"
                )
            return math.sqrt(value)
        case tree.Name(name):
            known_names = ", ".join(f"`{key}`" for key in scope) or "nothing yet"
            help = help_for_value(name) or did_you_mean(name, scope) or f"known: {known_names}"
            raise wrong(
                "E0201",
                f"`{name}` is neither a dim nor a constant",
                expr.span,
                "not known here",
                help,
            )
        case _:
            label = "numbers, dims, `+ - * /` and `sqrt(…)` only"
            help = help_for_digits(expr)
            if not help and isinstance(expr, tree.Number):  # it has a unit
                help = "units belong to settings; 10% is 0.1 here"
            raise wrong("E0301", "this is not arithmetic on dims", expr.span, label, help)


def apply(link: tree.Binary, left: Scalar, right: Scalar) -> Scalar:
    """`left` and `right`, joined by the operator of `link`."""
    left, right = exact(left), exact(right)
    match link.op:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/" if right:
            return left / right
        case "/":
            raise wrong("E0302", "division by zero", link.right.span, "is 0")
        case other:
            raise wrong(
                "E0301",
                f"`{other}` is not arithmetic on dims",
                link.span,
                "numbers, dims, `+ - * /` only",
            )


def exact(value: Scalar) -> Scalar:
    """The number as a fraction where it is whole, so that quotients stay exact."""
    return Fraction(value) if isinstance(value, int) else value


def whole(name: tree.Name, value: Scalar, expr: tree.Expr, scope: Mapping[str, Scalar]) -> int:
    """`value` as the size of the dim `name`.

    Raises PlanError where it is not a whole number from 1 to 2^48.
    """
    if value != int(value):
        label = f"{_to_text(expr, scope)} = {float(value):g}"
        help = _divisors_near(name, expr, scope)
        raise wrong("E0303", f"dim `{name}` is not a whole number", expr.span, label, help)
    if not 0 < value <= LARGEST:
        raise wrong(
            "E0304",
            f"dim `{name}` is out of range",
            expr.span,
            f"is {int(value)}; dims go from 1 to 2^48",
        )
    return int(value)


def _divisors_near(name: tree.Name, expr: tree.Expr, scope: Mapping[str, Scalar]) -> str:
    """The help for `head_dim = hidden / heads` that is not whole; "" for other expressions."""
    match expr:
        case tree.Binary("/", tree.Name(whole_name), tree.Name(parts_name)):
            size, parts = scope[whole_name], scope[parts_name]
        case _:
            return ""
    if not isinstance(size, int) or not isinstance(parts, int):
        return ""
    below = next(divisor for divisor in range(parts, 0, -1) if size % divisor == 0)
    above = next((divisor for divisor in range(parts, size) if size % divisor == 0), size)
    near = " or ".join(f"`{parts_name} = {divisor}`" for divisor in sorted({below, above}))
    return f"write {near}: {size} is a multiple; or give `{name}` a number of its own"


def _to_text(expr: tree.Expr, scope: Mapping[str, Scalar]) -> str:
    match expr:
        case tree.Name(name):
            return str(scope[name])
        case tree.Number(value):
            return str(value)
        case tree.Binary(op, left, right):
            return f"{_to_text(left, scope)} {op} {_to_text(right, scope)}"
        case _:
            return "…"
