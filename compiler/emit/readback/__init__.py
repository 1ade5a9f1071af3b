"""Reads an emitted `train.py` back and matches it to the IR: it does all that the IR says, and
nothing else.

Purpose: a second opinion on emission: the text is run on symbols, not by Python, and what it calls
is compared with the IR.  With the emitter it shares the IR and the table of ops.
Non-goals: whether the IR is right (`analysis.verifier`, `proof`), comments, docstrings and layout.
"""

import ast

from ...ir import Program
from .constants import check_files
from .module import File

__all__ = ["check", "check_files"]


def check(text: str, program: Program) -> int:
    """Matches the text of an emitted `train.py` to `program`, op for op; returns how many ops it
    does, which is all.

    Raises AssertionError, with the line, where the two differ.
    """
    try:
        return File(program, ast.parse(text)).compare()
    except SyntaxError as error:
        raise AssertionError(f"emit: line {error.lineno}: {error.msg}") from None
    except (MemoryError, RecursionError):
        raise AssertionError("emit: line 0: is nested too deeply to be a program") from None
