"""The values that cross a pipeline's cuts: repeats that are cut carry all that later statements
read of earlier ones.

Purpose: afterwards only the values that a cut's repeat carries cross that cut.  Non-goals:
parameters, which each rank has, and values that each stage computes from the model's inputs by
itself (`ir.stages.is_free`).
"""

from collections.abc import Mapping

from attrs import evolve

from ..ir import (
    Arg,
    Enter,
    Leave,
    Names,
    Op,
    Pipeline,
    Program,
    Region,
    Stmt,
    Value,
    Yield,
    rename,
    results,
    uses,
)
from ..ir.stages import is_made_once


def thread_carries(program: Program, pipeline: Pipeline) -> Region:
    """The model whose repeats that are cut carry the values that are read in them and after
    them.
    """
    region, names, types = program.region, Names(program.types), program.types
    body: list[Stmt] = []
    bound: list[str] = []  # what could cross a cut
    renamed: dict[str, str] = {}  # the present names of values, where they have changed
    for index, stmt in enumerate(region.body):
        current = rename(stmt, renamed)
        if isinstance(stmt, Region) and isinstance(current, Region) and stmt.dim in pipeline.dims:
            read = set(uses(evolve(stmt, args=()), *region.body[index + 1 :]))
            read.update(end.name for end in region.yields)
            through = dict[str, Value]()
            for name in bound:
                if name in read:
                    through[name] = Value(renamed.get(name, name), types[name])
            current, following = _carrying(current, through, names)
            renamed |= following
        body.append(current)
        bound += _results_of_one_stage(stmt)
    yields = tuple(evolve(end, name=renamed.get(end.name, end.name)) for end in region.yields)
    return evolve(region, body=tuple(body), yields=yields)


def _results_of_one_stage(stmt: Stmt) -> list[str]:
    """The results of a statement that only the stage that made them has."""
    if isinstance(stmt, Op) and stmt.kind == "leaf":
        return []
    return [value.name for value in results(stmt) if is_made_once(value)]


def _carrying(
    repeat: Region, through: Mapping[str, Value], names: Names
) -> tuple[Region, dict[str, str]]:
    """The repeat that carries these values too, unchanged, and their names after it."""
    inner = {name: _fresh(value, names) for name, value in through.items()}
    following = {name: _fresh(value, names) for name, value in through.items()}
    carries, others = list[Arg](), list[Arg]()
    for arg in repeat.args:
        (carries if arg.enter is Enter.CARRY else others).append(arg)
    new_names = dict[str, str]()
    for name, value in through.items():
        carries.append(Arg(inner[name], value.name, Enter.CARRY))
        new_names[value.name] = inner[name].name
    yields = [*repeat.yields]
    for value in inner.values():
        yields.append(Yield(value.name, Leave.LAST))
    wider = evolve(
        repeat,
        args=(*carries, *others),
        body=tuple(rename(stmt, new_names) for stmt in repeat.body),
        yields=tuple(yields),
        results=(*repeat.results, *following.values()),
    )
    return wider, {name: value.name for name, value in following.items()}


def _fresh(value: Value, names: Names) -> Value:
    return evolve(value, name=names.fresh(value.name))
