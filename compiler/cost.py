"""What an op costs: operations of its forward, as they are counted for balance.

Non-goals: times (they need a machine).  An op whose cost is that of reading its operands counts an operation for each
element, which against matrix products is next to nothing.
"""

from math import prod

from .ir import Op, Program


def flops(program: Program, op: Op) -> int:
    """Operations of one run of an op, on all ranks together."""
    made = sum(prod(map(program.size, value.type.dims)) for value in op.outputs)
    match op.kind:
        case "leaf":
            return 0
        case "contract":
            return 2 * made * prod(map(program.size, op.names("over")))
        case "attention":
            return 4 * made * program.size("seq")
        case _:
            return made
