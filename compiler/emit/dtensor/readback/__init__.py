"""Reads an emitted program of torch alone back and matches it to the IR, by the machine of
`emit.readback`.

Purpose: the forward is matched op for op, each coercion by its placements; the other functions do
what `expected` says.  Non-goals: whether functions of torch and of `torch_ops.py` do what their
names say.
"""

from ....ir import Program
from .module import TorchFile

__all__ = ["check"]


def check(text: str, program: Program) -> int:
    """Matches the text of a program of torch alone to `program`; returns how many ops it does,
    which is all.

    Raises AssertionError, with the line, where the two differ.
    """
    try:
        return TorchFile(program, text).compare()
    except SyntaxError as error:
        raise AssertionError(f"emit: line {error.lineno}: {error.msg}") from None
    except (MemoryError, RecursionError):
        raise AssertionError("emit: line 0: is nested too deeply to be a program") from None
