"""The operations of a step: those that its model needs, and those that a rank does.

Both are of matrix products and attention; a step's rate of them is its MFU and its HFU.
"""

from collections.abc import Sequence
from math import prod

from ...ir import MICROBATCHES, Op, Program, Region, Stmt, walk
from ...ops import OPS, roles
from ...ops.embedding import EMBEDDING
from ...ops.saved_tensors import Local
from ..communication import active_count
from ..flops import cost
from ..param_uses import leaves


def needed(program: Program) -> int:
    """The operations that a model needs for a step, on all ranks together.

    6 for each token and parameter but those of a table that is only looked up, and attention's of
    the pairs that its mask lets through.
    """
    of, uses = leaves(program), list[tuple[str, str]]()
    for op in walk(program.forward.body):
        uses += [(of[name], op.kind) for name in op.inputs if name in of]
    looked_up = {name for name, kind in uses if kind == EMBEDDING.name}
    looked_up -= {name for name, kind in uses if kind != EMBEDDING.name}
    tables = sum(prod(map(program.valid, program.param(name).type.dims)) for name in looked_up)
    tokens = program.train.global_batch * program.train.seq
    return 6 * tokens * (active_count(program) - tables) + 3 * _attention(
        program, program.forward.body
    )


def _attention(program: Program, body: Sequence[Stmt]) -> int:
    """Forward's operations of all microbatches, on all ranks together."""

    def of(stmts: Sequence[Stmt]) -> int:
        inner = (
            of(it.body) * program.size(it.dim) if isinstance(it, Region) else each(it)
            for it in stmts
        )
        return sum(inner)

    def each(op: Op) -> int:
        return cost(program, [op]).forward if roles(op, program.types).key_seq else 0

    return of(body) * program.size(MICROBATCHES)


def done(program: Program) -> int:
    """The operations of a step that a rank does, backward's recomputation too; of a pipeline, a
    rank's on average.
    """
    stages = program.axis(program.pipeline.axis).size if program.pipeline else 1
    return _of(program, program.region.body) // stages


def _of(program: Program, body: Sequence[Stmt]) -> int:
    inner = (
        _of(program, stmt.body) * (program.size(stmt.dim) if stmt.dim else 1)
        if isinstance(stmt, Region)
        else OPS[stmt.kind].work(Local(program, stmt, program.operands(stmt))).operations
        for stmt in body
    )
    return sum(inner)
