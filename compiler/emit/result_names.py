"""Names the results of a `forward` in Python.

Purpose: a name says what its value is.  The plan's own names come first, except for rows of
experts, whose plan calls them by one name before and after the experts.  A product that the plan
does not name is called by its weight, `gate` of `w_gate`.  Non-goals: numbers that keep names of
several values apart (`line_writer`).
"""

import re
from collections import Counter
from collections.abc import Sequence

from ..ir import FLOATS, Kind, Op, Stmt, base
from ..ops import roles
from ..ops.algebra import ADD, CONTRACT
from ..ops.attention import ATTENTION
from ..ops.experts import (
    COMBINE,
    DISPATCH,
    EXCHANGE,
    EXCHANGE_BACK,
    EXCHANGE_PADDED,
    GROUPED,
    WAIT,
    begins,
)
from ..ops.fused import CONTRACTS, NORMS
from .module import Frame
from .naming import TAKEN

MOVES = {EXCHANGE.name, EXCHANGE_BACK.name, EXCHANGE_PADDED.name, WAIT.name, "coerce"}
"""The ops whose result is the operand at other ranks."""

PRODUCTS = {CONTRACT.name, CONTRACTS.name}
"""The ops whose results are products of the first operand with weights."""

UNNAMED = f"_{CONTRACT.stem}"
"""The name in the IR of products, sums and other results that say nothing of themselves."""

ADDEND = "y"
"""The name of what a layer adds to its value, `x = x + y`.

All additions have one name: the next one takes the place of the last, whose memory is freed.
"""

SUMS = {ADD.name, *NORMS.values()}
"""The ops whose first result is a sum of operands."""

ATTENDED = "attn"
"""The name of attention's result; its name in the IR, `_o`, stays as it is, for names are part of
the hash by which a run knows its checkpoints, and `o` is the product with `wo`.
"""

WEIGHT = re.compile(r"(?:.*_)?w(?:_([^\W\d]\w*)|([qkvo]+(?:_\w+)?))")
"""A weight's name and, in it, the name of its product: `w_gate` and `gate`, `wq_a` and `q_a`."""


def make_result_names(frame: Frame, body: Sequence[Stmt]) -> dict[str, str]:
    """The Python name of each result of the ops of a body, by value."""
    ops = [stmt for stmt in body if isinstance(stmt, Op)]
    namer = _Namer(frame, ops)
    for op in ops:
        for place, value in enumerate(op.outputs):
            namer.names[value.name] = namer.make_name(op, place)
    return namer.names


class _Namer:
    """Names the results of a body's ops, in their order."""

    def __init__(self, frame: Frame, ops: Sequence[Op]) -> None:
        self._frame = frame
        self._from_experts = _find_rows_from_experts(ops)
        self._rotated = _find_rotated(frame, ops)
        self._addends = _find_addends(frame, ops)
        self._routed = {base(op.outputs[0].name) for op in ops if op.kind == COMBINE.name}
        self.names: dict[str, str] = {}

    def make_name(self, op: Op, place: int) -> str:
        """The name of one of an op's results."""
        value = op.outputs[place]
        if value.type.axes_in(Kind.MAXIMUM):
            return "local_max"
        if value.type.dtype in FLOATS and self._frame.program.experts_of(value.type):
            name = self._make_name_of_rows(op, value.name)
            return f"pending_{name}" if begins(op) else name
        if not value.name.startswith("_"):
            return base(value.name)
        if value.name in self._rotated:
            return self._rotated[value.name]
        if value.name in self._addends:
            return ADDEND
        return self._make_name_of_unnamed(op, place)

    def _make_name_of_rows(self, op: Op, value: str) -> str:
        """The name of rows of experts: before them, after them, or within them."""
        source = self.names.get(op.inputs[0], "").removeprefix("pending_")
        if op.kind == DISPATCH.name or (op.kind in MOVES and source == "expert_in"):
            return "expert_in"
        if value in self._from_experts:
            return "expert_out"
        if op.kind == GROUPED.name and value.startswith("_"):
            return self._make_name_of_product(op.inputs[0], op.inputs[1])
        is_named = not value.startswith("_") and base(value) not in self._routed
        return base(value) if is_named else "expert_hidden"

    def _make_name_of_unnamed(self, op: Op, place: int) -> str:
        """The name of a result that has none in the plan.

        A result that only moves or adjusts a product, as a bias does, is called as the product is.
        """
        name = base(op.outputs[place].name)
        if name != UNNAMED:
            return ATTENDED if name == f"_{ATTENTION.stem}" else name
        if op.kind in PRODUCTS:
            x, *weights = op.inputs
            return self._make_name_of_product(x, weights[place])
        first = op.inputs[0]
        is_adjusted = first.startswith(UNNAMED) and not self._has_another_as_wide(op)
        return self.names.get(first, name) if is_adjusted else name

    def _has_another_as_wide(self, op: Op) -> bool:
        """Whether another operand than the first one has all dims of the result."""
        types = self._frame.types
        return any(types[other].dims == op.outputs[0].type.dims for other in op.inputs[1:])

    def _make_name_of_product(self, x: str, weight: str) -> str:
        """The name of a product of `x` with a weight: `gate` of `w_gate`, `q_a` of `wq_a`.

        It is the weight's own name where that has no such form, and where Python or `x` has the
        name.
        """
        param = self._frame.leaves.get(weight)
        if param is None:
            return UNNAMED
        name = self._get_name_without_part(param)
        match = WEIGHT.fullmatch(name)
        role = (match[1] or match[2]) if match else name
        return name if role in TAKEN or role == self.names.get(x) else role

    def _get_name_without_part(self, param: str) -> str:
        """A parameter's name without the number of the part of a repeat that it is of, `wq` of
        `wq_1` in `layers_1`: a class has layers of one part.
        """
        stacked = self._frame.params[param].type.dims[: self._frame.params[param].stacked]
        number = stacked[-1].rpartition("_")[2] if stacked else ""
        return param.removesuffix(f"_{number}") if number.isdecimal() else param


def _find_rows_from_experts(ops: Sequence[Op]) -> set[str]:
    """The rows that experts give back: what is combined, and the same rows at other ranks."""
    found = set[str]()
    for op in reversed(ops):
        if op.kind == COMBINE.name or (op.kind in MOVES and op.outputs[0].name in found):
            found.add(op.inputs[0])
    return found


def _find_addends(frame: Frame, ops: Sequence[Op]) -> set[str]:
    """The values without names in the plan that alone are added to one with a name, `x = x + y`;
    and what they are before they are moved.
    """
    found = set[str]()
    for op in reversed(ops):
        if op.kind == "coerce" and op.outputs[0].name in found:
            found.add(op.inputs[0])
        if op.kind not in SUMS or op.outputs[0].name.startswith("_"):
            continue
        dims, name = op.outputs[0].type.dims, base(op.outputs[0].name)
        summands = [value for value in op.inputs if frame.types[value].dims == dims]
        others = [value for value in summands if base(value) != name]
        if len(summands) == 2 and len(others) == 1 and base(others[0]) == UNNAMED:
            found.update(others)
    return found


def _find_rotated(frame: Frame, ops: Sequence[Op]) -> dict[str, str]:
    """The values that nothing but a rotation reads, each with the name of its rotated value."""
    uses = Counter[str]()
    for op in ops:
        uses.update(op.inputs)
    found = dict[str, str]()
    for op in ops:
        if not roles(op, frame.types).rotated:
            continue
        for value, result in zip(op.inputs, op.outputs, strict=False):
            is_named = not result.name.startswith("_")
            if is_named and uses[value] == 1 and value.startswith("_"):
                found[value] = base(result.name)
    return found
