"""Reads an emitted `train.py` back and matches it to the IR: it does all that the IR says, and nothing else.

Purpose: a second opinion on emission; shares with what writes the text the IR and its tables, and no code.
Non-goals: whether the IR is right (`wellformed`, `verify`), comments, docstrings and layout.
"""

import ast

from ...ir import Program
from .module import File


def check(text: str, program: Program) -> int:
    """Matches the text of an emitted `train.py` to `program`, op for op; returns how many ops it does, which is all.

    Raises AssertionError, with the line, where the two differ.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise AssertionError(f"emit: line {error.lineno}: {error.msg}") from None
    return File(program, tree).read()
