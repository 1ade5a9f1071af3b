"""Errors that several modules of the frontend raise."""

from collections.abc import Iterable, Sequence

from ..ir import DATA_DIMS, MICROBATCHES
from ..syntax import tree
from ..syntax.diagnostics import did_you_mean, wrong
from ..syntax.source import Span

LONGEST = 64
"""The most characters of a name."""


def check_name(name: tree.Name) -> None:
    """Raises PlanError unless `name` may be a name.

    Names become attributes and variables; names of unnamed values begin with `_`.
    """
    if name.name.startswith("_") or len(name.name) > LONGEST:
        help = f"names begin with a letter and have at most {LONGEST} characters"
        raise wrong("E0215", f"`{name.name[:LONGEST]}` cannot be a name", name.span, help=help)


def check_dim(dim: tree.Name, dims: Iterable[str]) -> None:
    """Raises PlanError where the model has no such dim."""
    if dim.name not in (names := sorted(dims)):
        raise wrong(
            "E0201",
            f"there is no dim `{dim}`",
            dim.span,
            "not a dim",
            did_you_mean(dim.name, names),
        )


def check_count(results: int, names: Sequence[str], span: Span) -> None:
    """Raises PlanError unless the results of a call have as many names, or one place without a
    name.
    """
    if results == len(names):
        return
    wanted = f"bound to {len(names)} names" if len(names) > 1 else "wanted as one tensor"
    result_count = f"{results} results" if results > 1 else "one result"
    help = f"write `{', '.join('abcdefgh'[:results])} = …`" if 1 < results < 9 else ""
    raise wrong("E0602", f"{result_count}, {wanted}", span, f"gives {result_count}", help)


def check_not_data(dim: tree.Name, what: str) -> None:
    """Raises PlanError where a dim is of the data: parameters and repeats go over the model's."""
    if dim.name in (*DATA_DIMS, MICROBATCHES):
        raise wrong(
            "E0216",
            f"{what} cannot go over `{dim}`",
            dim.span,
            "a dim of the data, not of the model",
        )
