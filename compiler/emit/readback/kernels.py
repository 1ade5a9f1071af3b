"""What a program with kernels makes of their classes, from the table of kernels alone.

Non-goals: what it calls these functions with (`calls`).
"""

import ast

from ...analysis.kernel_tiles import Used, kernels_of
from ...ir import Program


def kernels(program: Program) -> dict[str, ast.expr]:
    """Each function and what makes it."""
    return {used.function: ast.parse(_made(used), mode="eval").body for used in kernels_of(program)}


def _made(used: Used) -> str:
    chunk = f", chunk={used.chunk}" if used.chunk else ""
    return f"{used.name}({{{', '.join(f'{size}: {tile}' for size, tile in used.tiles)}}}{chunk})"
