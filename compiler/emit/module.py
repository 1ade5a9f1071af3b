"""The classes of a model under construction, the parts they share, and the attributes their
`__init__` declares.

Non-goals: their `forward` (`forward`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap

from attrs import Factory, define, field, frozen

from ..analysis.bucket_layout import get_stored_dims, is_stored_as_matrix
from ..analysis.param_uses import leaves
from ..ir import SEQUENCE, Attr, Bucket, Buffer, Enter, Op, Param, Program, Region, Type
from ..ops import roles
from ..ops.call import Layout, Positions
from .build import compute
from .constants import product, size_names
from .layer_names import LayerName, make_layer_names
from .naming import (
    DTYPES,
    WIDTH,
    call,
    fit_line,
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
    axes: tuple[str, ...] = ()  # the axes that shard the sequence
    dim_name: str = field(default="", eq=False)  # the dim that the table is for


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
    """How many values stages of a pipeline make for the next ones, each number once; empty for a
    module that is not cut into stages.
    """
    held: dict[str, tuple[int, ...]] = field(factory=dict[str, tuple[int, ...]])
    """In a model in stages, the stages that need an attribute, if not all do."""

    def attributes(self) -> set[str]:
        """All names taken so far."""
        return {*self.axes.values(), *self.layouts.values(), *self.declared, *self.tables.values()}

    @property
    def weights(self) -> dict[str, Param]:
        """The parameters, by attribute."""
        weights = dict[str, Param]()
        for name, declaration in self.declared.items():
            if not isinstance(declaration, Child):
                weights[name] = declaration
        return weights

    @property
    def children(self) -> dict[str, Child]:
        """The layers of repeats, by attribute."""
        children = dict[str, Child]()
        for name, declaration in self.declared.items():
            if isinstance(declaration, Child):
                children[name] = declaration
        return children

    @property
    def header(self) -> str:
        """The line that begins `forward`."""
        results = self.result.count(",") + 1
        returns = f" -> {tensors(*self.crossing, results)}:"
        arguments = ["self", *(f"{name}: {type}" for name, type in self.arguments.items())]
        return call("def forward", arguments, 4, len(returns)) + returns


def in_lines(doc: str) -> str:
    """A class' docstring; its shapes have lines of their own where it is too long for one."""
    head, _, shapes = doc.partition("  ")
    if len(f'    """{doc}"""') <= WIDTH:
        return doc
    lines = wrap(shapes.replace(": [", ":\0["), WIDTH - 4)
    return "\n    ".join([f"{head}\n", *lines, ""]).replace("\0", " ")


def tensors(*counts: int) -> str:
    """The Python type of so many tensors; a union where there are several counts."""
    types = list[str]()
    for count in dict.fromkeys(counts):
        types.append("Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]")
    return " | ".join(types)


@define
class Frame:
    """State that all classes of a program share."""

    program: Program
    recomputed_values: set[str]  # values that backward makes once more
    target: Target = RUNTIME_TARGET
    types: Mapping[str, Type] = Factory(lambda self: self.program.types, takes_self=True)
    # by name
    params: dict[str, Param] = Factory(
        lambda self: {param.name: param for param in self.program.params_and_buffers},
        takes_self=True,
    )
    # value → its parameter's name
    leaves: dict[str, str] = Factory(lambda self: leaves(self.program), takes_self=True)
    classes: list[Module] = Factory(list[Module])  # innermost first
    # by the dims of repeats
    layer_names: dict[str, LayerName] = Factory(
        lambda self: make_layer_names(self.program), takes_self=True
    )
    # each parameter's name pattern in the model's state
    patterns: dict[str, str] = Factory(dict[str, str])
    # by dim
    sizes: dict[str, str] = Factory(
        lambda self: size_names(self.program, self.types, self.target), takes_self=True
    )

    def param(self, leaf: str) -> Param:
        """The parameter that a value is."""
        return self.params[self.leaves[leaf]]

    def add_slices(self, region: Region) -> None:
        """Notes which parameters the slices are that a repeat's body gets."""
        for arg in region.args:
            if arg.enter is Enter.EACH and arg.source in self.leaves:
                self.leaves[arg.value.name] = self.leaves[arg.source]

    def declare(self, module: Module, prefix: str, param: Param) -> str:
        """Declares a parameter in `module` and returns its attribute."""
        attribute = identifier(param.name, module.attributes())
        module.declared[attribute] = param
        self.patterns[param.name] = prefix + attribute
        return attribute

    def bucket_per_layer(self, value: str) -> Bucket | None:
        """The bucket of layers that a value is a parameter or a flat buffer of."""
        dims, param = self.types[value].dims, self.leaves.get(value)
        for bucket in self.program.buckets:
            if bucket.layers and (param in bucket.params or bucket.dim in dims):
                return bucket
        return None


def table_of(op: Op, types: Mapping[str, Type], program: Program) -> Table:
    """The table of rotary positions that an op `rope` needs."""
    type, seq = types[op.inputs[0]], roles(op, types).query_seq
    dim = type.dims[-1]
    scaling = dict(op.attrs)
    theta = scaling.pop("theta")
    dims = scaling.pop("dims", program.local_size(type, dim))
    assert isinstance(theta, float), "emit: rope without theta"
    return Table(
        program.size(seq),
        round(float(str(dims))),
        theta,
        seq_dim=type.dims.index(seq) - len(type.dims),
        scaling=tuple(scaling.items()),
        axes=type.axes_of(seq),
        dim_name=dim,
    )


def weight_lines(
    attribute: str, param: Param, program: Program, names: Mapping[str, str], indent: int
) -> list[str]:
    """The declaration of a parameter in its module, as one layer has it; `names` are the names of
    sizes.
    """
    if isinstance(param, Buffer):
        return [_buffer_line(attribute, param, program, names)]
    groups, type, joined = parameter_sizes(param)
    arguments = ["mesh", *(product(names, program, group) for group in groups)]
    split = list[str]()
    for i, group in enumerate(groups):
        if axes := type.axes_of(group[0]):
            over = axes[0] if len(axes) == 1 else axes
            split.append(f"{i}: {literal(over)}")
    if split:
        arguments.append(f"shard={{{', '.join(split)}}}")
    arguments.append(f"init={param.init.kind}({', '.join(map(literal, param.init.args))})")
    code = call(f"self.{attribute} = weight", arguments, indent, 0)
    comment = matrix_shape(type, joined, program)
    line = f"{code}  # {comment}"
    if "\n" not in code and indent + len(line) <= WIDTH:
        return [line]
    return [f"# {comment}", *call(f"self.{attribute} = weight", arguments, 0, indent).split("\n")]


def _buffer_line(attribute: str, buffer: Buffer, program: Program, names: Mapping[str, str]) -> str:
    """The declaration of a buffer, which begins with zeros."""
    _, type, _ = parameter_sizes(buffer)
    sizes = ", ".join(product(names, program, (dim,)) for dim in type.dims)
    zeros = f"torch.zeros({sizes}, device=mesh.device)"
    shape = matrix_shape(type, 0, program)
    return f"self.register_buffer({literal(attribute)}, {zeros})  # {shape}"


def parameter_sizes(param: Param) -> tuple[list[tuple[str, ...]], Type, int]:
    """One layer's part of a parameter: the dims of each stored dim, its type, and how many dims
    are joined last.
    """
    type = param.type
    for dim in type.dims[: param.stacked]:
        type = type.inside(dim)
    return get_stored_dims(param), type, param.inner if is_stored_as_matrix(param) else 0


# ---- the attributes that `__init__` sets

Field = tuple[str, str]
"""An attribute, and the line that sets it."""


def fields(module: Module, program: Program, sizes: Mapping[str, str]) -> Iterator[str]:
    """The lines of `__init__` after `super().__init__()`; `sizes` are names of dims' sizes."""
    for axes, name in module.axes.items():
        yield f"self.{name} = mesh.axis({', '.join(map(literal, axes))})"
    for layout, name in module.layouts.items():
        yield f"self.{name} = {layout_text(layout, program, sizes)}"
    cut, stages = (), 0
    if program.pipeline:
        stages = len(program.pipeline.stage_to_rank)
        cut = program.pipeline.dims if module.crossing else ()
    lines_by_field = list[Field]()
    for name, declaration in module.declared.items():
        if isinstance(declaration, Child):
            lines = _modules(name, declaration, cut, sizes)
        else:
            lines = weight_lines(name, declaration, program, sizes, 12)
        lines_by_field += [(name, line) for line in lines]
    yield from _lines_in_branches(module, lines_by_field, stages)
    for table, name in module.tables.items():
        yield from _table(name, table, program, sizes)


def _lines_in_branches(module: Module, declared: Iterable[Field], stages: int) -> Iterator[str]:
    """Each line, in a branch where not all stages need what it sets."""
    for needing, lines in groupby(declared, key=lambda field: module.held.get(field[0], ())):
        indent = ""
        if needing:
            indent = "    "
            words = [stage_word(stage, stages) for stage in needing]
            if len(words) == 1:
                yield f"if {words[0]} in stages:"
            else:
                yield f"if {{{', '.join(words)}}} & {{*stages}}:"
        yield from (f"{indent}{line}" for _, line in lines)


def _modules(name: str, child: Child, cut: Sequence[str], sizes: Mapping[str, str]) -> list[str]:
    if child.dim in cut:
        modules = _of_stages(child)
    else:
        count = sizes.get(child.dim, child.count)
        modules = f"nn.ModuleList({child.module.name}(mesh) for _ in range({count}))"
    return fit_line(f"self.{name} = {modules}", 8).replace("\n        ", "\n").split("\n")


def _of_stages(child: Child) -> str:
    """The modules of this rank's stages, by the number of their layer."""
    layers = f"for stage in stages for i in {layers_word(child.dim)}[stage]"
    return f"nn.ModuleDict({{str(i): {child.module.name}(mesh) {layers}}})"


def _table(name: str, table: Table, program: Program, names: Mapping[str, str]) -> Iterator[str]:
    arguments = [*ropes(table, program, names), "mesh=mesh"]
    if table.axes:
        yield f"positions = {layout_text(Positions(SEQUENCE, table.axes), program, names)}"
        arguments.append("positions=positions")
    line = f"{name} = rope_frequencies({', '.join(arguments)})"
    yield from fit_line(line, 8).replace("\n        ", "\n").split("\n")
    yield f"self.register_buffer({literal(name)}, {name}, persistent=False)"


def ropes(table: Table, program: Program, names: Mapping[str, str]) -> Iterator[str]:
    """The arguments that say which rotary positions a table has."""
    yield names.get(SEQUENCE, str(table.seq))
    # the dim's name says its whole size, and a table may be of a part
    is_whole = table.dim == program.size(table.dim_name)
    yield names.get(table.dim_name, str(table.dim)) if is_whole else str(table.dim)
    yield f"theta={literal(table.theta).removesuffix('.0')}"
    if table.seq_dim != -3:  # with heads between sequence and head dim, the function's default
        yield f"seq_dim={table.seq_dim}"
    yield f"dtype={DTYPES[compute(program)]}"
    yield from (f"{key}={literal(value)}" for key, value in table.scaling)
