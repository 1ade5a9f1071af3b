"""The lines that make functions of kernels, and which classes they need.

Non-goals: which kernels a program has, and their tiles (`compiler.kernels`).
"""

from ..ir import Program, walk
from ..kernels import PLAIN, Used, chip, kernels_of
from .words import WIDTH, literal


def kernel_lines(program: Program) -> list[str]:
    """One function a line; none where a program calls torch's own."""
    used = kernels_of(program)
    head = f"# Triton kernels, by the size they work on, with tiles for {chip(program)}; elsewhere torch does the same."
    return [head, *map(_line, used)] if used else []


def kernel_names(program: Program) -> tuple[list[str], list[str]]:
    """The classes that these lines import, and the functions that they make."""
    used = kernels_of(program)
    plain = {op.kind for op in walk(program.region.body)} & {*PLAIN}
    names = sorted({*(each.name for each in used), "Tile", *plain}) if used else []
    return names, [*(each.function for each in used), *plain]


def _line(used: Used) -> str:
    entries = [f"{size}: Tile({', '.join(f'{k}={literal(v)}' for k, v in tile)})" for size, tile in used.tiles]
    rest = f", chunk={used.chunk}" if used.chunk else ""
    line = f"{used.function} = {used.name}({{{', '.join(entries)}}}{rest})"
    if len(line) <= WIDTH:
        return line
    rest = f"    chunk={used.chunk},\n" if used.chunk else ""
    inner = "".join(f"        {entry},\n" for entry in entries)
    return f"{used.function} = {used.name}(\n    {{\n{inner}    }}{',' if rest else ''}\n{rest})"
