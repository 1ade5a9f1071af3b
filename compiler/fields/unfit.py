"""What a value is told that does not fit."""

from .. import syntax
from ..diagnostics import Diagnostic, PlanError
from ..source import Span

_NOUNS: dict[type, str] = {
    syntax.Name: "a name",
    syntax.String: "a string",
    syntax.List: "a list",
    syntax.Call: "a call",
    syntax.ParamUse: "a parameter",
}


def unfit(setting: syntax.Setting, expr: syntax.Expr, what: str, help: str = "") -> PlanError:
    """The error for a value of the wrong type; `what` is the right one."""
    match expr:
        case syntax.Number(value=value, unit=unit):
            found = f"`{value}{unit}`"
        case _:
            found = _NOUNS.get(type(expr), "an expression")
    return wrong("E0404", f"`{setting.key}` takes {what}, not {found}", expr.span, help)


def wrong(code: str, message: str, span: Span, help: str = "") -> PlanError:
    """The error for a value, with help."""
    return PlanError([Diagnostic(code, message, span, help=help)])
