"""What the statements of a forward body read, and what of them backward makes again.

Non-goals: how they are written (`bodies`).
"""

from collections.abc import Iterator

from ..analysis.recompute import is_made_again, runs_again
from ..ir import Op, Program, Region, Stmt, ops_in, regions_in, results


def reads(body: tuple[Stmt, ...]) -> Iterator[str]:
    """Every reading of a value by the statements of a body."""
    for stmt in body:
        if isinstance(stmt, Op):
            yield from stmt.inputs
        else:
            yield from (arg.source for arg in stmt.args)
            yield from captured(stmt)


def captured(region: Region) -> list[str]:
    """Values from outside that a repeat's body reads, other than by its arguments."""
    inside = {arg.value.name for arg in region.args}
    found: dict[str, None] = {}
    for stmt in region.body:
        names = stmt.inputs if isinstance(stmt, Op) else [*(a.source for a in stmt.args), *captured(stmt)]
        found |= dict.fromkeys(name for name in names if name not in inside)
        inside |= {value.name for value in results(stmt)}
    return list(found)


def made_again(program: Program, region: Region) -> set[str]:
    """Results of single forward ops that backward makes again instead of keeping them."""
    if runs_again(program, region):
        return set()
    inner = [made_again(program, stmt) for stmt in regions_in(region.body)]
    own = [op for op in ops_in(region.body) if is_made_again(program, op)]
    return {op.outputs[0].name for op in own}.union(*inner)
