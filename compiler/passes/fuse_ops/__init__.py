"""Puts one op in the place of several, where kernels do their work in one pass over memory or in
one product.

Purpose: a function and its product become a gate, products of one value with several weights one
product, a sum and its norm one op, rotations of queries and keys one, the head and the loss one
that saves no logits, gathers of keys and of values one collective.  Before: `insert_collectives`,
so that no ops are fused between which ranks communicate.  Non-goals: which kernels run
(`analysis.kernel_tiles`), and programs without any (`kernels = torch`).
"""

from collections.abc import Callable

from attrs import evolve

from ...config.settings import TRITON
from ...ir import Program, Region, Stmt
from .context import FusionContext
from .loss import heads
from .patterns import gates, joint_coercions, norms, products, ropes

Pattern = Callable[[tuple[Stmt, ...], FusionContext], tuple[Stmt, ...]]

PATTERNS: tuple[Pattern, ...] = (heads, gates, products, ropes, norms, joint_coercions)


def fuse_ops(program: Program) -> Program:
    """The program with ops fused."""
    if program.train.kernels != TRITON:
        return program
    known = FusionContext.of(program)
    region = _fuse_region(program.region, known)
    return evolve(program, region=region, dims=(*program.dims, *known.dims))


def _fuse_region(region: Region, known: FusionContext) -> Region:
    stmts = list[Stmt]()
    for stmt in region.body:
        stmts.append(_fuse_region(stmt, known) if isinstance(stmt, Region) else stmt)
    body = tuple(stmts)
    for pattern in PATTERNS:
        body = pattern(body, known)
    return evolve(region, body=body)
