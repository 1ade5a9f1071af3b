"""What the modules of `resolve` say of mistakes: one diagnostic, raised at once."""

from ... import syntax
from ...diagnostics import Diagnostic, PlanError
from ...ir import DATA_DIMS, MICROBATCHES
from ...source import Span

LONGEST = 64
"""The most characters of a name."""


def wrong(code: str, message: str, span: Span, label: str = "", help: str = "") -> PlanError:
    """The error of one mistake."""
    return PlanError([Diagnostic(code, message, span, label, help=help)])


def check_name(name: syntax.Name) -> None:
    """Names become attributes and variables; those of unnamed values begin with `_`."""
    if name.name.startswith("_") or len(name.name) > LONGEST:
        help = f"names begin with a letter and have at most {LONGEST} characters"
        raise wrong("E0215", f"`{name.name[:LONGEST]}` cannot be a name", name.span, help=help)


def check_not_data(dim: syntax.Name, what: str) -> None:
    """Parameters and repeats go over dims of the model."""
    if dim.name in (*DATA_DIMS, MICROBATCHES):
        raise wrong("E0216", f"{what} cannot go over `{dim}`", dim.span, "a dim of the data, not of the model")
