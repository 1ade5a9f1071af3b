"""What a value is told that does not fit."""

from ...syntax import tree
from ...syntax.diagnostics import Diagnostic, PlanError
from ...syntax.source import Span

_NOUNS: dict[type, str] = {
    tree.Name: "a name",
    tree.String: "a string",
    tree.List: "a list",
    tree.Call: "a call",
    tree.ParamUse: "a parameter",
}


def unfit(setting: tree.Setting, expr: tree.Expr, what: str, help: str = "") -> PlanError:
    """The error for a value of the wrong type; `what` is the right one."""
    found = f"`{expr.span.words}`" if isinstance(expr, tree.Number) else _NOUNS.get(type(expr), "an expression")
    return wrong("E0404", f"`{setting.key}` takes {what}, not {found}", expr.span, help)


POWERS = {"k": 1, "m": 2, "g": 3, "b": 3, "t": 4}
"""Letters for thousands, millions and so on, which may be those of 1000 or of 1024."""


def spelled(expr: tree.Expr) -> str:
    """Help for a whole number that is not written in digits; "" for others."""
    match expr:
        case tree.Number(value=value, unit=unit) if unit.casefold() in POWERS:
            meant = (value * base ** POWERS[unit.casefold()] for base in (1024, 1000))
        case tree.Number(value=float() as value, unit=""):
            meant = (value,)
        case _:
            return ""
    whole = " or ".join(f"`{number:.0f}`" for number in meant if number % 1 == 0)
    return f"write {whole}: a whole number is written in digits" if whole else ""


def wrong(code: str, message: str, span: Span, help: str = "") -> PlanError:
    """The error for a value, with help."""
    return PlanError([Diagnostic(code, message, span, help=help)])
