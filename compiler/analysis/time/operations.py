"""The operations of a step: the ones that its model needs, and the ones that a rank does.

Both count matrix products and attention; a step's rate of them is its MFU and its HFU.
"""

from collections.abc import Sequence
from math import prod

from ...ir import MICROBATCHES, Program, Region, Stmt, walk
from ...ops import OPS, roles
from ...ops.embedding import EMBEDDING
from ...ops.saved_tensors import Local
from ..communication import active_count
from ..flops import cost
from ..param_uses import leaves


def needed(program: Program) -> int:
    """The operations that a model needs for a step, on all ranks together.

    6 for each token and parameter, but for tables that are only looked up; and attention's
    operations on the pairs that its mask lets through.
    """
    param_of, looked_up, multiplied = leaves(program), set[str](), set[str]()
    for op in walk(program.forward.body):
        params = looked_up if op.kind == EMBEDDING.name else multiplied
        params.update(param_of[name] for name in op.inputs if name in param_of)
    tables = 0
    for name in looked_up - multiplied:
        tables += prod(map(program.valid, program.param(name).type.dims))
    tokens = program.train.global_batch * program.train.seq
    products = 6 * tokens * (active_count(program) - tables)
    return products + 3 * _attention(program, program.forward.body)


def _attention(program: Program, body: Sequence[Stmt]) -> int:
    """Forward's operations of all microbatches, on all ranks together."""

    def count_operations(stmts: Sequence[Stmt]) -> int:
        operations = 0
        for stmt in stmts:
            if isinstance(stmt, Region):
                operations += count_operations(stmt.body) * program.size(stmt.dim)
            elif roles(stmt, program.types).key_seq:
                operations += cost(program, [stmt]).forward
        return operations

    return count_operations(body) * program.size(MICROBATCHES)


def done(program: Program) -> int:
    """The operations of a step that a rank does, backward's recomputation too; in a pipeline, the
    average over ranks.
    """
    stages = program.axis(program.pipeline.axis).size if program.pipeline else 1
    return _of(program, program.region.body) // stages


def _of(program: Program, body: Sequence[Stmt]) -> int:
    operations = 0
    for stmt in body:
        if isinstance(stmt, Region):
            times = program.size(stmt.dim) if stmt.dim else 1
            operations += _of(program, stmt.body) * times
        else:
            work = OPS[stmt.kind].work(Local(program, stmt, program.operands(stmt)))
            operations += work.operations
    return operations
