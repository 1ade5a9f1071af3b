"""Reads emitted `train_step` and `eval_step`: statements at the scope of the step, matched to its ops and regions.

Purpose: what is counted, reduced and updated, over which axes and in which order.  Non-goals: the model (`forward`).
"""

import ast

from attrs import frozen

from ...ir import INVARIANT, PARTIAL, REPLICATED, Op, Program, Region, Type, walk
from ...placements import coercion_of, ends
from .calls import Axes
from .text import DTYPES, Names, Ops, demand, demand_same, keywords, literal, statements, targets, wrong

INPUTS = ("tokens", "labels")
"""What `batch.microbatches()` gives of each microbatch, in the runtime's order."""


@frozen
class Zero:
    """`torch.zeros_like(…)`, to which a sum over microbatches is added."""

    type: Type


@frozen
class Mark:
    """The mesh, or the flat gradients by bucket."""

    of: str


MESH, GRADIENTS = Mark("mesh"), Mark("gradients")

Seen = str | Axes | Zero | Mark
"""A value of the IR, or what has none."""


def microbatches(program: Program) -> Region:
    """The step's region of forward and backward."""
    (region,) = (stmt for stmt in program.region.body if isinstance(stmt, Region))
    return region


class Step:
    """Reads `train_step`, or `eval_step`, which does what the loss and the count of labels need."""

    def __init__(
        self, program: Program, types: dict[str, Type], same: dict[str, str], names: frozenset[str], node: ast.FunctionDef
    ) -> None:
        self._program, self._types, self._node = program, types, node
        self._names, self._region = Names.of(node, names), microbatches(program)
        self._trains = node.name == "train_step"
        self._params = {p.name for p in program.params}
        loss, norm, count = (end.name for end in program.region.yields[:3])
        self._returns = {"loss": loss, "norm": norm, "tokens": count} if self._trains else {"loss": loss, "tokens": count}
        body = [stmt for stmt in program.region.body if isinstance(stmt, Op)]
        needed = {v.name for op in body for v in op.outputs} if self._trains else _needed(program, {loss, count})
        self._ops = Ops((op for op in body if op.outputs[0].name in needed), same, self._is_leaf)
        self._order = [op for op in body if op.outputs[0].name in needed and op.kind == "coerce" and coercion_of(op).collective]
        self._env: dict[str, Seen] = {} if self._trains else {"mesh": MESH}
        self._flat: dict[str, str] = {}  # bucket → the value that its gradient holds
        self._ran = False
        self.given: tuple[str, ...] = ()  # the inputs, in the order in which the model takes them

    def _is_leaf(self, op: Op) -> bool:
        """Whether an op is a step from a parameter to its uses that the state makes without a call."""
        free = op.kind == "cast" or (op.kind == "coerce" and ends(op) == (INVARIANT, REPLICATED))
        return free and self._ops_first(op.inputs[0]) in self._params

    def read(self) -> int:
        """Reads all statements; returns how many ops they do, but for those of the model's forward."""
        *body, last = statements(self._node)
        for stmt in body:
            self._statement(stmt)
        self._return(last)
        demand(self._node, self._ran, "no microbatch is run")
        reduced = [op.outputs[0].name for op in self._ops.done if op in self._order]
        demand(self._node, reduced == [op.outputs[0].name for op in self._order], f"reduces in the order {reduced}")
        backward = self._region.body[1]
        assert isinstance(backward, Region), "emit: no backward block"
        return self._ops.finish(self._node) + sum(1 for _ in walk(backward.body))
