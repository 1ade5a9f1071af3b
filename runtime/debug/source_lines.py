"""The program line of a coercion, and the names of its values.

The source is read when a value has to be named: once, on failure.
"""

import ast
import linecache
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any, cast

from torch import nn

_PACKAGE = __name__.rsplit(".", 2)[0] + "."  # the runtime
_BETWEEN = "contextlib"  # the module of a `with` block's own function


@dataclass(frozen=True, slots=True)
class Line:
    """A call in the program; `module` and `microbatch` (from 1, or 0 outside of any) say which run
    of its line it is.
    """

    code: CodeType
    instruction: int  # bytes into the code
    module: str
    microbatch: int

    @property
    def operand(self) -> str:
        """The text of the call's first argument."""
        return ast.unparse(self._call().args[0])

    @property
    def result(self) -> str:
        """The name that the line gives to the call's result; the text of the call where it is
        inside another expression.
        """
        call = ast.unparse(self._call())
        for stmt in self._statements():
            if isinstance(stmt, ast.With) and (target := stmt.items[0].optional_vars):
                return ast.unparse(target)
            if isinstance(stmt, ast.Assign) and ast.unparse(stmt.value) == call:
                return ast.unparse(stmt.targets[0])
            if isinstance(stmt, ast.Expr) and ast.unparse(stmt.value) == call:
                return self.operand  # changed in place
        return call

    @property
    def place(self) -> str:
        """`llama.scale:22, train.py:61`: the plan's line, from a comment, and the program's."""
        return place(self.code.co_filename, self._number())

    def _span(self) -> tuple[int, int, int, int]:
        """First and last line, first and last column (in bytes) of the call."""
        positions = next(islice(self.code.co_positions(), self.instruction // 2, None))
        assert None not in positions, "where: code without positions"
        return cast("tuple[int, int, int, int]", positions)

    def _number(self) -> int:
        return self._span()[0]

    def _statements(self) -> list[ast.stmt]:
        """The statement of the line; none where it goes on in the next line.

        Emitted programs write a statement on one line.
        """
        source = linecache.getline(self.code.co_filename, self._number()).strip()
        for text in (source, f"{source}\n pass"):  # the second for a line that opens a block
            with suppress(SyntaxError):
                return ast.parse(text).body
        return []

    def _call(self) -> ast.Call:
        """The coercion."""
        start, end, left, right = self._span()
        lines = list[bytes]()
        for number in range(start, end + 1):
            lines.append(linecache.getline(self.code.co_filename, number).encode())
        lines[-1] = lines[-1][:right]
        text = b"".join([lines[0][left:], *lines[1:]]).decode()
        block = next((stmt for stmt in self._statements() if isinstance(stmt, ast.With)), None)
        # the call of a block has the position of the whole block
        call = block.items[0].context_expr if block else ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call), "where: a coercion that is no call"
        return call


def plan_line(file: str, number: int) -> str:
    """`llama.scale:22` for a line of the program; "" where the program does not say the plan's
    line.

    The plan's line is at the end of the line's comment, or of a comment above it.
    """
    comments = [linecache.getline(file, number).partition("#")[2]]
    above = linecache.getline(file, number - 1).strip()
    if above.startswith("#"):
        comments.append(above[1:])
    for comment in comments:
        if match := re.search(r"(\S+:\d+)\s*$", comment):
            return match[1]
    return ""


def place(file: str, number: int) -> str:
    """A line of the program, with the plan's line before it."""
    line_of_program = f"{Path(file).name}:{number}"
    line_of_plan = plan_line(file, number)
    if not line_of_plan:
        return line_of_program
    return f"{line_of_plan}, {line_of_program}"


def first_use(model: nn.Module, parameter: str) -> str:
    """The first line in the `forward` of a parameter's module that reads the parameter, as
    `Line.place`; "" if none does.
    """
    owner, _, attribute = parameter.rpartition(".")
    modules: dict[str, Any] = dict(cast(Any, model).named_modules())
    if owner not in modules:
        return ""
    code = modules[owner].forward.__func__.__code__
    last = max(line for *_, line in code.co_lines() if line)
    use = re.compile(rf"self\.{attribute}\b")
    for number in range(code.co_firstlineno, last + 1):
        if use.search(linecache.getline(code.co_filename, number)):
            return place(code.co_filename, number)
    return ""


def calling_line(module: str, microbatch: int) -> Line:
    """The line that called into this package."""
    frame = cast(Any, sys)._getframe(1)
    while (name := str(frame.f_globals["__name__"])).startswith(_PACKAGE) or name == _BETWEEN:
        assert frame.f_back, "where: called by nobody"
        frame = frame.f_back
    return Line(frame.f_code, frame.f_lasti, module, microbatch)
