"""A step as far as its loss.

Purpose: whoever asks for the loss alone, of all microbatches, need not do their backward.
Non-goals: the rows of a pipeline, which have forwards and backwards among one another.
"""

from collections.abc import Container

from attrs import evolve

from ..ir import Program, Region, Stmt, uses
from .pipeline.split import made


def forward(program: Program) -> tuple[Stmt, ...]:
    """The statements of a step of which its loss is made."""
    wanted, found = {program.region.yields[0].name}, list[Stmt]()
    for stmt in reversed(program.region.body):
        if wanted & {*made(stmt)}:
            own = _ahead(stmt, wanted) if isinstance(stmt, Region) else stmt
            found.append(own)
            wanted.update(uses(own) if isinstance(own, Region) else own.inputs)
    return tuple(reversed(found))


def _ahead(microbatches: Region, wanted: Container[str]) -> Region:
    """The microbatches without backward, and of their results those that are wanted."""
    pairs = zip(microbatches.yields, microbatches.results, strict=True)
    ends = [(end, value) for end, value in pairs if value.name in wanted]
    return evolve(
        microbatches,
        body=tuple(stmt for stmt in microbatches.body if not isinstance(stmt, Region) or stmt.kind != "backward"),
        yields=tuple(end for end, _ in ends),
        results=tuple(value for _, value in ends),
    )
