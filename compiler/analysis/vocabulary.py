"""The vocabulary of a program: what its ids count."""

from ..ir import Program
from ..ops import roles


def tables(program: Program) -> dict[str, str]:
    """The values that ops look up rows of by ids, and the dim of the rows."""
    rows_by_table: dict[str, str] = {}
    for op in program.ops:
        rows = roles(op, program.types).rows
        if rows:
            for name in op.inputs:
                if rows in program.types[name].dims:
                    rows_by_table[name] = rows
    return rows_by_table


def vocabulary(program: Program) -> str:
    """The dim that counts ids: for each of them every table has a row and every loss a class."""
    classes = {roles(op, program.types).classes for op in program.ops} - {""}
    return min(sorted({*tables(program).values(), *classes}), key=program.valid)
