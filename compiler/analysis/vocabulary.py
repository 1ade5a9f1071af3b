"""The vocabulary of a program: what its ids count."""

from ..ir import Program
from ..ops import roles


def tables(program: Program) -> dict[str, str]:
    """The values in which ops look up rows by ids, and the dim of the rows."""
    pairs = ((op, roles(op, program.types).rows) for op in program.ops)
    return {
        name: rows
        for op, rows in pairs
        for name in op.inputs
        if rows and rows in program.types[name].dims
    }


def vocabulary(program: Program) -> str:
    """The dim that counts ids: for each of them every table has a row and every loss a class."""
    classes = {roles(op, program.types).classes for op in program.ops} - {""}
    return min(sorted({*tables(program).values(), *classes}), key=program.valid)
