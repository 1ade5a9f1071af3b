"""The ops of a step that some of its values need.

Non-goals: what is done with them.
"""

from ...ir import Op, Program, Region, blocks, walk


def _read(region: Region) -> set[str]:
    """All names that ops of a region, and regions in it, read."""
    own = {name for op in walk(region.body) for name in op.inputs}
    inner = [stmt for stmt in region.body if isinstance(stmt, Region)]
    return own.union({arg.source for each in inner for arg in each.args}, *map(_read, inner))


def needed(program: Program, wanted: set[str] | None) -> list[Op]:
    """The ops of the step on which the values `wanted` depend, or all."""
    ops = [stmt for stmt in program.region.body if isinstance(stmt, Op)]
    if wanted is None:
        return ops
    region, forward, _ = blocks(program)
    names = wanted | {arg.source for arg in region.args} | _read(forward)
    for op in reversed(ops):
        if names & {value.name for value in op.outputs}:
            names.update(op.inputs)
    return [op for op in ops if names & {value.name for value in op.outputs}]
