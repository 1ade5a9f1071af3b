"""What a program with kernels makes of their classes, from the table of kernels alone.

Non-goals: what it calls these functions with (`calls`).
"""

import ast

from ...ir import Program
from ...kernels import KERNELS, PLAIN, Used, kernels_of

CLASSES = frozenset({"Tile", *PLAIN, *(kernel.name for kernel in KERNELS.values())})
"""The names that a program may import of the kernels."""


def kernels(program: Program) -> dict[str, ast.expr]:
    """Each function and what makes it."""
    return {used.function: ast.parse(_made(used), mode="eval").body for used in kernels_of(program)}


def _made(used: Used) -> str:
    entries = (f"{size}: Tile({', '.join(f'{key}={value}' for key, value in tile)})" for size, tile in used.tiles)
    chunk = f", chunk={used.chunk}" if used.chunk else ""
    return f"{used.name}({{{', '.join(entries)}}}{chunk})"
