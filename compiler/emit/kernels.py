"""The lines that make functions of kernels, and what they and the rest of a program need of the kernels.

Non-goals: which kernels a program has, and their tiles (`compiler.kernels`).
"""

from ..analysis.kernel_tiles import Used, chip, kernels_of
from ..ir import Program
from .naming import WIDTH


def kernel_lines(program: Program) -> list[str]:
    """One function a line; none where a program calls torch's own."""
    used = kernels_of(program)
    if not used:
        return []
    head = f"# Triton kernels, by the size they work on, with tiles for {chip(program)}; elsewhere torch does the same."
    return [head, *map(_line, used)]


def _line(used: Used) -> str:
    entries = [f"{size}: {tile}" for size, tile in used.tiles]
    rest = f", chunk={used.chunk}" if used.chunk else ""
    line = f"{used.function} = {used.name}({{{', '.join(entries)}}}{rest})"
    if len(line) <= WIDTH:
        return line
    rest = f"    chunk={used.chunk},\n" if used.chunk else ""
    inner = "".join(f"        {_broken(entry)},\n" for entry in entries)
    return f"{used.function} = {used.name}(\n    {{\n{inner}    }}{',' if rest else ''}\n{rest})"


def _broken(entry: str) -> str:
    """A tile of tiles with one of them a line, where it is long."""
    if len(entry) + 9 <= WIDTH:
        return entry
    head, _, parts = entry.partition("(")
    lines = parts.removesuffix("))").split("), ")
    return f"{head}(\n" + "".join(f"            {line}),\n" for line in lines) + "        )"
