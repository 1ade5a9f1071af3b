"""Whether the constants that ops are given make sense."""

from collections.abc import Callable

from ..ir import Op, Program
from ..ops import OPS, roles
from ..syntax.diagnostics import Diagnostics

Range = tuple[Callable[[float], bool], str]
"""A condition on a constant, and its text."""

_NOT_NEGATIVE: Range = (lambda value: value >= 0, "0 or above")
_ABOVE_0: Range = (lambda value: value > 0, "a number above 0, for instance 10000")

RANGES: dict[str, dict[str, Range]] = {
    "attention": {
        "window": (lambda value: value >= 0 and value % 1 == 0, "a whole number, 0 for all keys"),
        "scale": (lambda value: value >= 0, "a number above 0, or 0 for head_dim^(-1/2)"),
        "softcap": (lambda value: value >= 0, "a number above 0, for instance 50, or 0 for none"),
    },
    "cross_entropy": {
        "smoothing": (lambda value: 0 <= value < 1, "from 0 to below 1, for instance 0.1"),
        "z": (lambda value: value >= 0, "0 or above, for instance 1e-4"),
    },
    "layernorm": {"eps": _NOT_NEGATIVE},
    "rmsnorm": {"eps": _NOT_NEGATIVE},
    "rope": dict.fromkeys(("theta", "factor", "low", "high", "original"), _ABOVE_0),
    "softcap": {"cap": (lambda value: value > 0, "a number above 0, for instance 30")},
}
"""By op and argument."""


def check_constants(program: Program, found: Diagnostics) -> None:
    """Each is in its range, and rotation turns pairs."""
    for op in program.ops:
        for name, (holds, help) in RANGES.get(op.kind, {}).items():
            value = _number(op, name)
            if not holds(value):
                found.error("E0313", f"{op.kind}'s {name} is {value}", op.span, help=help)
        if last := roles(op, program.types).rotated:
            _rope(program, op, last, found)


def _number(op: Op, name: str) -> float:
    value = OPS[op.kind].get(op, name)
    assert isinstance(value, float), f"{op.kind}: {name} is no number"
    return value


def _rope(program: Program, op: Op, last: str, found: Diagnostics) -> None:
    dims, size, scaling = _number(op, "dims"), program.size(last), OPS["rope"].get(op, "scaling")
    if size % 2 and not dims:
        help = f"make it even, or rotate fewer dims with `dims={size - 1}`"
        found.error("E0312", f"rope rotates pairs, but `{last}` = {size} is odd", op.span, help=help)
    if dims and not (dims % 2 == 0 and 0 < dims < size):
        help = f"an even number below {size}, or leave `dims` out, which rotates all of `{last}`"
        found.error("E0312", f"rope cannot rotate {dims:g} of `{last}` = {size}", op.span, help=help)
    if scaling == "none" and _number(op, "factor") != 1:
        help = "add `scaling=linear` or `scaling=llama3`"
        found.error("E0313", "rope has a factor and no scaling", op.span, help=help)
    low, high = _number(op, "low"), _number(op, "high")
    if scaling == "llama3" and low >= high:
        help = "wavelengths between original / high and original / low are scaled in part"
        found.error("E0313", f"rope's low is {low:g}, and its high {high:g}", op.span, help=help)
