"""What a program with kernels makes of their classes, from the table of kernels alone.

Non-goals: what it calls these functions with (`calls`).
"""

import ast

from ...ir import Program
from ...kernels import KERNELS, kernels_of

CLASSES = frozenset({"Tile", *(kernel.name for kernel in KERNELS.values())})
"""The names that a program may import of the kernels."""


def kernels(program: Program) -> dict[str, ast.expr]:
    """Each function and what makes it."""
    return {used.function: ast.parse(_made(used.name, used.tiles), mode="eval").body for used in kernels_of(program)}


def _made(name: str, tiles: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]) -> str:
    entries = (f"{size}: Tile({', '.join(f'{key}={value}' for key, value in tile)})" for size, tile in tiles)
    return f"{name}({{{', '.join(entries)}}})"
