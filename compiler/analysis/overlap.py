"""Ops that run while rows of experts are under way: they are between an exchange that only begins
and its `wait`.

Non-goals: which ops these are to be (`passes.overlap_exchanges`), and how long they take.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from ..ir import Op, Region, Stmt
from ..ops import OPS
from ..ops.protocol import begins


def beside(body: Sequence[Stmt]) -> Iterator[tuple[Op, list[Op]]]:
    """Each exchange that begins in a body, at any depth, with the ops that run beside it."""
    for i, stmt in enumerate(body):
        if isinstance(stmt, Region):
            yield from beside(stmt.body)
        elif begins(stmt):
            later_ops = (op for op in body[i + 1 :] if isinstance(op, Op))
            yield stmt, [*takewhile(lambda op: not OPS[op.kind].awaits, later_ops)]
