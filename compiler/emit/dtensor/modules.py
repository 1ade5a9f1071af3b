"""The attributes that modules of a program of torch alone declare: weights, layers, tables.

Non-goals: their `forward` (`emit.forward`).
"""

from collections.abc import Iterator, Mapping

from attrs import evolve

from ...ir import Param, Program
from ..constants import product
from ..module import Child, Module, Table, parameter_sizes, ropes
from ..naming import call, fit_line, literal, matrix_shape
from ..target import mesh_axes, placements, zigzag_ranks
from . import staged

INDENT = 8
"""The columns before a line of `__init__`."""

WIDEST_WITH_COMMENT = 108
"""The columns that a declaration and the comment behind it may take beside their indent."""


def field_lines(module: Module, program: Program, sizes: Mapping[str, str]) -> Iterator[str]:
    """The lines of `__init__` of a module."""
    cut_dims: tuple[str, ...] = ()
    if module.crossing and program.pipeline:
        cut_dims = program.pipeline.dims
    for name, declared in module.declared.items():
        if isinstance(declared, Child):
            yield f"self.{name} = {_layers(declared, cut_dims, sizes)}"
        else:
            yield from _weight(name, declared, program, sizes)
    if cut_dims:
        yield from staged.deletion_lines(module, program)
    for table, name in module.tables.items():
        yield from _table(table, name, program, sizes)
    if module.crossing:
        yield "self.stage = stage"


def _layers(child: Child, cut_dims: tuple[str, ...], sizes: Mapping[str, str]) -> str:
    """The expression for the layers of a repeat, or for the layers that a stage has."""
    count = sizes.get(child.dim, str(child.count))
    if child.dim in cut_dims:
        return staged.stage_layers(child, count)
    return f"nn.ModuleList({child.module.name}(mesh) for _ in range({count}))"


def _weight(name: str, param: Param, program: Program, sizes: Mapping[str, str]) -> list[str]:
    """The declaration of a parameter as one layer has it, and a comment with its shape on a rank:
    behind it, or before it if the line would be too long.
    """
    groups, type, joined = parameter_sizes(param)
    stored = evolve(type, dims=tuple(group[0] for group in groups))
    arguments = ["mesh", *(product(sizes, program, group) for group in groups)]
    arguments.append(f"placements={placements(stored, program)}")
    init = {"normal": "std={}", "ones": "mean=1.0", "zeros": ""}[param.init.kind]
    if init:
        arguments.append(init.format(*param.init.args))
    code = call(f"self.{name} = weight", arguments, INDENT, 0)
    comment = matrix_shape(type, joined, program)
    if "\n" not in code and len(code) + len(comment) < WIDEST_WITH_COMMENT:
        return [f"{code}  # {comment}"]
    return [f"# {comment}", *_without_indent(code)]


def _table(table: Table, name: str, program: Program, sizes: Mapping[str, str]) -> list[str]:
    """The lines that make a table of rotary positions, and register it."""
    split: list[str] = []
    for axis in mesh_axes(program):
        split.append("Shard(1)" if axis in table.axes else "Replicate()")
    arguments = ["mesh", *ropes(table, program, sizes), f"placements=[{', '.join(split)}]"]
    arguments += zigzag_options(program)
    line = fit_line(f"{name} = rope_frequencies({', '.join(arguments)})", INDENT)
    register = f"self.register_buffer({literal(name)}, {name}, persistent=False)"
    return [*_without_indent(line), register]


def _without_indent(code: str) -> list[str]:
    """The lines of a statement that was broken to fit `__init__`; the template indents them."""
    return code.replace(f"\n{' ' * INDENT}", "\n").split("\n")


def zigzag_options(program: Program) -> list[str]:
    """The argument that says how many ranks have two chunks of the sequence each, if some do."""
    ranks = zigzag_ranks(program)
    return [f"zigzag={ranks}"] if ranks > 1 else []
