"""What the names of a model stand for at the statement that is being read.

Non-goals: parameters, of which a repeat has slices (`parameters`).
"""

from collections.abc import Iterable, Mapping

from ..syntax import tree
from ..syntax.diagnostics import Diagnostic, Note, PlanError
from .arithmetic import Scalar
from .errors import check_dim, check_name


class Scope:
    """Numbers and dims, inputs and parameters as declared, and the value that each name is bound to."""

    def __init__(self, numbers: Mapping[str, Scalar], dims: Iterable[str]) -> None:
        self.numbers, self.dims = numbers, sorted(dims)
        self.bound: dict[str, str] = {}
        self.declared: dict[str, tree.Name] = {}

    def check_free(self, name: tree.Name) -> None:
        """Raises PlanError where `name` cannot be bound: it is an input or a parameter, or no name."""
        check_name(name)
        if first := self.declared.get(name.name):
            notes = (Note(first.span, "declared here"),)
            raise PlanError(
                [Diagnostic("E0207", f"`{name}` is an input or a parameter", name.span, "bound again", notes)]
            )

    def check_dim(self, dim: tree.Name) -> None:
        """Raises PlanError where the model has no such dim."""
        check_dim(dim, self.dims)

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
