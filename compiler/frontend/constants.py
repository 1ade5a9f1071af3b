"""Whether the constants that ops are given make sense."""

from ..ir import Op, Program
from ..ops import OPS, OpDef, roles
from ..syntax.diagnostics import Diagnostics


def check_constants(program: Program, found: Diagnostics) -> None:
    """Each is in its range, and rotation takes pairs."""
    for op in program.ops:
        check_ranges(OPS[op.kind], op, found)
        if last := roles(op, program.types).rotated:
            _rope(program, op, last, found)


def check_ranges(entry: OpDef, op: Op, found: Diagnostics) -> None:
    """The numbers that an op has are in their ranges."""
    for name, (holds, help) in ((each.name, each.range) for each in entry.attributes if each.range):
        value = dict(op.attrs).get(name)
        if isinstance(value, float) and not holds(value):
            found.error("E0313", f"{op.kind}'s {name} is {value}", op.span, help=help)


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
        help = "add `scaling=linear`, `scaling=llama3` or `scaling=yarn`"
        found.error("E0313", "rope has a factor and no scaling", op.span, help=help)
    low, high = _number(op, "low"), _number(op, "high")
    if scaling in ("llama3", "yarn") and low >= high:
        help = "`low` is below `high`: wavelengths between original / high and original / low are scaled in part"
        found.error("E0313", f"rope's `low` is {low:g}, but its `high` is {high:g}", op.span, help=help)
