"""The facts about a program that fusion patterns ask for, and changes of a body."""

from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen

from ...ir import Dim, Enter, Names, Op, Param, Program, Region, Stmt, Type, uses
from ...syntax.source import Span


@frozen
class FusionContext:
    """The program that is fused.

    parameters  the values that are parameters, or slices of one, and whose
    readers     how many ops read each parameter
    apart       kinds of ops that stay by themselves
    dims        the dims that patterns add
    """

    program: Program
    types: Mapping[str, Type]
    uses: Counter[str]
    parameters: Mapping[str, Param]
    readers: Counter[str]
    apart: frozenset[str]
    names: Names
    dims: list[Dim] = field(factory=list[Dim])

    @classmethod
    def of(cls, program: Program) -> "FusionContext":
        types = program.types
        params = {param.name: param for param in program.params}
        leaves = dict[str, Param]()
        for op in program.ops:
            if op.kind == "leaf":
                leaves |= dict.fromkeys((value.name for value in op.outputs), params[op.inputs[0]])
        parameters = leaves | _slices(program.region, leaves)
        readers = Counter[str]()
        for op in program.ops:
            readers.update(parameters[name].name for name in op.inputs if name in parameters)
        return cls(
            program, types, uses(program.region), parameters, readers, _apart(program), Names(types)
        )

    @property
    def program_with_dims(self) -> Program:
        """The program with the dims that patterns added so far."""
        return evolve(self.program, dims=(*self.program.dims, *self.dims))

    def dim(self, name: str, size: int, span: Span) -> str:
        """The dim of a name that patterns give it, which it has alone."""
        while name in {dim.name for dim in self.program.dims}:
            name += "_"
        if name not in {dim.name for dim in self.dims}:
            self.dims.append(Dim(name, size, span=span))
        return name

    def ops(self, body: Sequence[Stmt], *kinds: str) -> list[tuple[int, Op]]:
        """The ops of these kinds that may be fused, with their places."""
        free = {*kinds} - self.apart
        places = list[tuple[int, Op]]()
        for i, stmt in enumerate(body):
            if isinstance(stmt, Op) and stmt.kind in free:
                places.append((i, stmt))
        return places

    def ops_by_result(self, body: Sequence[Stmt], *kinds: str) -> dict[str, tuple[int, Op]]:
        """The ops of these kinds that may be fused, with their places, by their first results."""
        by_result = dict[str, tuple[int, Op]]()
        for index, op in self.ops(body, *kinds):
            by_result[op.outputs[0].name] = index, op
        return by_result


def _slices(region: Region, params: dict[str, Param]) -> dict[str, Param]:
    """The slices that repeats take of some values, layer by layer."""
    slices = dict[str, Param]()
    for arg in region.args:
        if arg.enter is Enter.EACH and arg.source in params:
            slices[arg.value.name] = params[arg.source]
    for stmt in region.body:
        if isinstance(stmt, Region):
            slices |= _slices(stmt, params | slices)
    return slices


def _apart(program: Program) -> frozenset[str]:
    """Ops that backward recomputes by their names."""
    recompute = program.train.recompute
    return frozenset(recompute.names if recompute.word == "selective" else ())


def replace_ops(body: Sequence[Stmt], by: Mapping[int, Op | None]) -> tuple[Stmt, ...]:
    """The body with other ops, or none, in the places of some."""
    stmts = (by.get(i, stmt) for i, stmt in enumerate(body))
    return tuple(stmt for stmt in stmts if stmt is not None)
