"""The draft of a model: what statements, expressions and routes read, and where they write."""

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..syntax.diagnostics import Diagnostics
from ..syntax.source import Span
from .builder import ModelBuilder
from .draws import Draws
from .expert_rules import check_rows
from .parameters import Parameters
from .scope import Scope
from .user_ops import UserOp


@frozen
class Draft:
    """A model as far as its statements have been read: names, parameters, ops and mistakes."""

    builder: ModelBuilder
    scope: Scope
    parameters: Parameters
    draws: Draws
    # the functions that the plan declares by `op`
    user_ops: Mapping[str, UserOp]
    diagnostics: Diagnostics

    def require_rows(self, operands: Sequence[str], span: Span) -> None:
        """Raises PlanError where an operand in a route is not of rows."""
        if self.scope.route.experts:
            for operand in operands:
                check_rows(self.builder.types[operand], span)
