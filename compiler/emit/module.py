"""The classes of a model under construction, the parts they share, and the attributes their
`__init__` declares.

Non-goals: their `forward` (`forward`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap

from attrs import Factory, define, field, frozen

from ..analysis.bucket_layout import stored_as_matrix, stored_dims
from ..analysis.param_uses import leaves
from ..ir import SEQUENCE, Attr, Bucket, Buffer, Op, Param, Program, Type
from ..ops import roles
from ..ops.call import Layout, Positions
from .build import compute
from .constants import product, size_names
from .naming import (
    DTYPES,
    WIDTH,
    call,
    fitted,
    identifier,
    layers_word,
    literal,
    matrix_shape,
    stage_word,
)
from .naming import layout as layout_text
from .target import RUNTIME_TARGET, Target


@frozen
class Table:
    """Rotary positions that a model computes once."""

    seq: int
    dim: int
    theta: float
    seq_dim: int  # of the tensors to rotate, from the last
    scaling: tuple[tuple[str, Attr], ...] = ()
    axes: tuple[str, ...] = ()  # that shard the sequence
    of: str = field(default="", eq=False)  # the dim that it is for


@frozen
class Child:
    """The modules of a class for the layers of a repeat."""

    module: "Module"
    dim: str
    count: int


@define
class Module:
    """A class under construction."""

    name: str
    doc: str
    # groups over axes, by attribute
    axes: dict[tuple[str, ...], str] = field(factory=dict[tuple[str, ...], str])
    # positions and experts, by attribute
    layouts: dict[Layout, str] = field(factory=dict[Layout, str])
    declared: dict[str, Param | Child] = field(factory=dict[str, Param | Child])
    """Parameters as one layer has them, and the layers of repeats, by attribute, in the order
    of their first use.
    """
    tables: dict[Table, str] = field(factory=dict[Table, str])
    arguments: dict[str, str] = field(factory=dict[str, str])  # Python types by name
    lines: list[str] = field(factory=list[str])
    result: str = ""
    crossing: tuple[int, ...] = ()
    """How many values stages of a pipeline make for the next ones, each number once; none of a
    module that is whole.
    """
    held: dict[str, tuple[int, ...]] = field(factory=dict[str, tuple[int, ...]])
    """In a model in stages, the stages that need an attribute, if not all do."""

    def attributes(self) -> set[str]:
        """All names taken so far."""
        return {*self.axes.values(), *self.layouts.values(), *self.declared, *self.tables.values()}

    @property
    def weights(self) -> dict[str, Param]:
        """The parameters, by attribute."""
        return {name: it for name, it in self.declared.items() if not isinstance(it, Child)}

    @property
    def children(self) -> dict[str, Child]:
        """The layers of repeats, by attribute."""
        return {name: it for name, it in self.declared.items() if isinstance(it, Child)}

    @property
    def header(self) -> str:
        """The line that begins `forward`."""
        returns = f" -> {tensors(*self.crossing, self.result.count(',') + 1)}:"
        arguments = ["self", *(f"{name}: {type}" for name, type in self.arguments.items())]
        return call("def forward", arguments, 4, len(returns)) + returns


def in_lines(doc: str) -> str:
    """A class' docstring, its shapes in lines of their own where it is too long for one."""
    head, _, shapes = doc.partition("  ")
    if len(f'    """{doc}"""') <= WIDTH:
        return doc
    lines = wrap(shapes.replace(": [", ":\0["), WIDTH - 4)
    return "\n    ".join([f"{head}\n", *lines, ""]).replace("\0", " ")


def tensors(*counts: int) -> str:
    """The Python type of one tensor, or several, where it may be any of these numbers."""
    return " | ".join(
        "Tensor" if n == 1 else f"tuple[{', '.join(['Tensor'] * n)}]" for n in dict.fromkeys(counts)
    )


@define
class Frame:
    """State that all classes of a program share."""

    program: Program
    recomputed_values: set[str]  # what backward makes once more
    target: Target = RUNTIME_TARGET
    types: Mapping[str, Type] = Factory(lambda self: self.program.types, takes_self=True)
    # value → its parameter
    leaves: dict[str, str] = Factory(lambda self: leaves(self.program), takes_self=True)
    classes: list[Module] = Factory(list[Module])  # innermost first
    # each parameter's name pattern in the model's state
    patterns: dict[str, str] = Factory(dict[str, str])
    # by dim
    sizes: dict[str, str] = Factory(
        lambda self: size_names(self.program, self.types), takes_self=True
    )

    def param(self, leaf: str) -> Param:
        """The parameter that a value is."""
        return next(param for param in self.program.stored if param.name == self.leaves[leaf])

    def declare(self, module: Module, prefix: str, param: Param) -> str:
        """Declares a parameter in `module` and returns its attribute."""
        attribute = identifier(param.name, module.attributes())
        module.declared[attribute] = param
        self.patterns[param.name] = prefix + attribute
        return attribute

    def bucket_per_layer(self, value: str) -> Bucket | None:
        """The bucket of layers that a value is a parameter or a flat buffer of."""
        dims, param = self.types[value].dims, self.leaves.get(value)
        return next(
            (b for b in self.program.buckets if b.layers and (param in b.params or b.dim in dims)),
            None,
        )


def table_of(op: Op, types: Mapping[str, Type], program: Program) -> Table:
    """The table of rotary positions that an op `rope` needs."""
    type, seq = types[op.inputs[0]], roles(op, types).query_seq
    seq_dim = type.dims.index(seq) - len(type.dims)
    given = dict(op.attrs)
    theta, dims = given.pop("theta"), given.pop("dims", program.local_size(type, type.dims[-1]))
    assert isinstance(theta, float), "emit: rope without theta"
    dim = type.dims[-1]
    axes = type.axes_of(seq)
    return Table(
        program.size(seq), round(float(str(dims))), theta, seq_dim, tuple(given.items()), axes, dim
    )


def weight_lines(
    attribute: str, param: Param, program: Program, names: Mapping[str, str], indent: int
) -> list[str]:
    """The declaration of a parameter in its module, as one layer has it; `names` are those of
    sizes.
    """
    if isinstance(param, Buffer):
        _, type, _ = parameter_sizes(param)
        zeros = (
            f"torch.zeros({', '.join(product(names, program, (dim,)) for dim in type.dims)},"
            " device=mesh.device)"
        )
        return [
            f"self.register_buffer({literal(attribute)}, {zeros})  #"
            f" {matrix_shape(type, 0, program)}"
        ]
    groups, type, joined = parameter_sizes(param)
    sizes = [product(names, program, group) for group in groups]
    split = {i: type.axes_of(group[0]) for i, group in enumerate(groups) if type.axes_of(group[0])}
    arguments = ["mesh", *sizes]
    if split:
        over = (f"{i}: {literal(axes[0] if len(axes) == 1 else axes)}" for i, axes in split.items())
        arguments.append(f"shard={{{', '.join(over)}}}")
    arguments.append(f"init={param.init.kind}({', '.join(map(literal, param.init.args))})")
    code, comment = (
        call(f"self.{attribute} = weight", arguments, indent, 0),
        matrix_shape(type, joined, program),
    )
    one = f"{code}  # {comment}"
    if "\n" not in code and indent + len(one) <= WIDTH:
        return [one]
    return [f"# {comment}", *call(f"self.{attribute} = weight", arguments, 0, indent).split("\n")]


def parameter_sizes(param: Param) -> tuple[list[tuple[str, ...]], Type, int]:
    """The dims of each stored dim of one layer's part of a parameter, its type, and how many
    dims are joined last.
    """
    type = param.type
    for dim in type.dims[: param.stacked]:
        type = type.inside(dim)
    return stored_dims(param), type, param.inner if stored_as_matrix(param) else 0


# ---- the attributes that `__init__` sets

Field = tuple[str, str]
"""An attribute, and the line that sets it."""


def fields(module: Module, program: Program, sizes: Mapping[str, str]) -> Iterator[str]:
    """The lines of `__init__` after `super().__init__()`; `sizes` are names of dims' sizes."""
    yield from (
        f"self.{name} = mesh.axis({', '.join(map(literal, axes))})"
        for axes, name in module.axes.items()
    )
    yield from (
        f"self.{name} = {layout_text(of, program, sizes)}" for of, name in module.layouts.items()
    )
    cut = program.pipeline.dims if module.crossing and program.pipeline else ()
    lines = {
        name: _modules(name, it, cut, sizes)
        if isinstance(it, Child)
        else weight_lines(name, it, program, sizes, 12)
        for name, it in module.declared.items()
    }
    declared = ((name, line) for name, each in lines.items() for line in each)
    yield from _branched(
        module, declared, len(program.pipeline.stage_to_rank) if program.pipeline else 0
    )
    for table, name in module.tables.items():
        yield from _table(name, table, program, sizes)


def _branched(module: Module, declared: Iterable[Field], stages: int) -> Iterator[str]:
    """Each line, in a branch where not all stages need what it sets."""
    for held, together in groupby(declared, key=lambda field: module.held.get(field[0], ())):
        if held:
            words = [stage_word(stage, stages) for stage in held]
            yield (
                f"if {words[0]} in stages:"
                if len(held) == 1
                else f"if {{{', '.join(words)}}} & {{*stages}}:"
            )
        yield from (f"{'    ' if held else ''}{line}" for _, line in together)


def _modules(name: str, child: Child, cut: Sequence[str], sizes: Mapping[str, str]) -> list[str]:
    of_all = (
        f"nn.ModuleList({child.module.name}(mesh) for _ in"
        f" range({sizes.get(child.dim, child.count)}))"
    )
    line = f"self.{name} = {_of_stages(child) if child.dim in cut else of_all}"
    return fitted(line, 8).replace("\n        ", "\n").split("\n")


def _of_stages(child: Child) -> str:
    """The modules of this rank's stages, by the number of their layer."""
    mine = f"for stage in stages for i in {layers_word(child.dim)}[stage]"
    return f"nn.ModuleDict({{str(i): {child.module.name}(mesh) {mine}}})"


def _table(name: str, table: Table, program: Program, names: Mapping[str, str]) -> Iterator[str]:
    arguments = [*ropes(table, program, names), "mesh=mesh"]
    if table.axes:
        yield f"positions = {layout_text(Positions(SEQUENCE, table.axes), program, names)}"
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
