"""The names of a model, and the repeats and the route around the statement that is being read."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from attrs import frozen

from ..ir import Arg, Stmt
from ..syntax import tree
from ..syntax.diagnostics import Note, wrong
from .arithmetic import Scalar
from .errors import check_name


class OpenRepeat:
    """A repeat whose body is being read: what it takes slices of, the parameters declared in it
    among these.
    """

    def __init__(self, dim: str, outside: list[Stmt]) -> None:
        """`outside` are the statements before it."""
        self.dim, self.outside = dim, outside
        self.slices: list[Arg] = []
        self.holds: dict[str, str] = {}
        self.draws = ""


@frozen
class OpenRoute:
    """A route whose body is being read."""

    # the dim that its parameters have in front
    experts: str
    # the order of its rows, where these are not padded
    order: tuple[str, ...]
    # the value of each name that is bound outside of it
    outside: Mapping[str, str]


NO_ROUTE = OpenRoute("", (), {})
"""Stands for the route around a statement that is in none."""


class Scope:
    """The names of a model, and what is open around the statement that is being read."""

    def __init__(self, numbers: Mapping[str, Scalar], dims: Iterable[str]) -> None:
        self.numbers, self.dims = numbers, sorted(dims)
        # the value of each name
        self.bound: dict[str, str] = {}
        # inputs and parameters
        self.declared: dict[str, tree.Name] = {}
        self.repeats: list[OpenRepeat] = []
        self.route = NO_ROUTE
        # in the logits of a route, the dim that stands for its experts
        self.twins: Mapping[str, str] = {}

    @contextmanager
    def in_logits(self, twins: Mapping[str, str]) -> Generator[None]:
        """Within it, parameters have twins of dims, and all is computed in float32 at least."""
        self.twins = twins
        try:
            yield
        finally:
            self.twins = {}

    def check_free(self, name: tree.Name) -> None:
        """Raises PlanError where `name` cannot be bound: it is an input or a parameter, or no
        name.
        """
        check_name(name)
        if first := self.declared.get(name.name):
            notes = [Note(first.span, "declared here")]
            raise wrong(
                "E0207",
                f"`{name}` is an input or a parameter",
                name.span,
                "rebound here",
                notes=notes,
            )

    def is_number(self, expr: tree.Expr) -> bool:
        """Whether all that an expression is made of are numbers."""
        pending = [expr]
        while pending:
            match pending.pop():
                case tree.Number():
                    pass
                case tree.Name(name) if name in self.numbers and name not in self.bound:
                    pass
                case tree.Negative(inner) | tree.Call(tree.Name("sqrt"), (inner,), ()):
                    pending.append(inner)
                case tree.Binary(_, left, right):
                    pending += (left, right)
                case _:
                    return False
        return True
