"""The attributes that `__init__` of an emitted class sets: groups of ranks, weights, modules of repeats, tables.

Purpose: in a model in stages, an attribute that some stages lack is set in a branch for the others.
Non-goals: which stage needs which attribute (`staged_forward`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from ..ir import SEQUENCE, Program
from ..ops.call import Positions
from .build import compute
from .module import Child, Module, Table, weight_lines
from .naming import DTYPES, fitted, layers_word, layout, literal, stage_word

Field = tuple[str, str]
"""An attribute, and the line that sets it."""


def fields(module: Module, program: Program, sizes: Mapping[str, str]) -> Iterator[str]:
    """The lines of `__init__` after `super().__init__()`; `sizes` are names of dims' sizes."""
    yield from (f"self.{name} = mesh.axis({', '.join(map(literal, axes))})" for axes, name in module.axes.items())
    yield from (f"self.{name} = {layout(of, program, sizes)}" for of, name in module.layouts.items())
    cut = program.pipeline.dims if module.crossing and program.pipeline else ()
    lines = {
        name: _modules(name, it, cut, sizes) if isinstance(it, Child) else weight_lines(name, it, program, sizes, 12)
        for name, it in module.declared.items()
    }
    declared = ((name, line) for name, each in lines.items() for line in each)
    yield from _branched(module, declared, len(program.pipeline.stage_to_rank) if program.pipeline else 0)
    for table, name in module.tables.items():
        yield from _table(name, table, program, sizes)


def _branched(module: Module, declared: Iterable[Field], stages: int) -> Iterator[str]:
    """Each line, in a branch where not all stages need what it sets."""
    for held, together in groupby(declared, key=lambda field: module.held.get(field[0], ())):
        if held:
            words = [stage_word(stage, stages) for stage in held]
            yield f"if {words[0]} in stages:" if len(held) == 1 else f"if {{{', '.join(words)}}} & {{*stages}}:"
        yield from (f"{'    ' if held else ''}{line}" for _, line in together)


def _modules(name: str, child: Child, cut: Sequence[str], sizes: Mapping[str, str]) -> list[str]:
    line = f"self.{name} = {_of_stages(child) if child.dim in cut else _of_all(child, sizes)}"
    return fitted(line, 8).replace("\n        ", "\n").split("\n")


def _of_stages(child: Child) -> str:
    """The modules of this rank's stages, by the number of their layer."""
    mine = f"for stage in stages for i in {layers_word(child.dim)}[stage]"
    return f"nn.ModuleDict({{str(i): {child.module.name}(mesh) {mine}}})"


def _of_all(child: Child, sizes: Mapping[str, str]) -> str:
    return f"nn.ModuleList({child.module.name}(mesh) for _ in range({sizes.get(child.dim, child.count)}))"


def _table(name: str, table: Table, program: Program, names: Mapping[str, str]) -> Iterator[str]:
    arguments = [*ropes(table, program, names), "mesh=mesh"]
    if table.axes:
        yield f"positions = {layout(Positions(SEQUENCE, table.axes), program, names)}"
        arguments.append("positions=positions")
    line = f"{name} = rope_frequencies({', '.join(arguments)})"
    yield from fitted(line, 8).replace("\n        ", "\n").split("\n")
    yield f"self.register_buffer({literal(name)}, {name}, persistent=False)"


def ropes(table: Table, program: Program, names: Mapping[str, str]) -> Iterator[str]:
    """The arguments that say which rotary positions a table has."""
    yield names.get(SEQUENCE, str(table.seq))
    yield str((names.get(table.of) if table.dim == program.size(table.of) else None) or table.dim)
    yield f"theta={literal(table.theta).removesuffix('.0')}"
    if table.seq_dim != -3:  # with heads between sequence and head dim, the function's default
        yield f"seq_dim={table.seq_dim}"
    yield f"dtype={DTYPES[compute(program)]}"
    yield from (f"{key}={literal(value)}" for key, value in table.scaling)
