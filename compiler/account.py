"""What a program's step communicates and how many parameters it has, read off the IR.

Purpose: one list of collectives, for the user, for `plan.json` and for the test that holds a recorded run against it.
Non-goals: time and memory.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal

from attrs import frozen

from .ir import ITEM_BYTES, Kind, Names, Op, Program, Region, base, types
from .placements import coercion_of, ends

Where = Literal["forward", "backward", "step"]


@frozen
class Collective:
    """A collective of the step as one rank sees it; it is done `count` times in a step, once for each turn of `loops`.

    op       all_reduce, all_gather, reduce_scatter or all_to_all
    maximum  whether an all_reduce takes the maximum, not the sum
    axes     the mesh axes of the group of `ranks` ranks
    shape    of the local tensor that goes in
    loops    the loops around it, outermost first, by their dims: `layers` is the step's first loop over layers,
             `layers.1` its second, so that the whole sequence of calls can be written out from the list
    value    the name of what comes out
    line     the plan's line that asks for it, as `name.scale:7`
    """

    op: str
    maximum: bool
    axes: tuple[str, ...]
    ranks: int
    dtype: str
    shape: tuple[int, ...]
    loops: tuple[str, ...]
    count: int
    where: Where
    value: str
    line: str

    @property
    def elements(self) -> int:
        """The number of elements that go in."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in bytes of what goes in."""
        return self.elements * ITEM_BYTES[self.dtype]


def collectives(program: Program) -> tuple[Collective, ...]:
    """Everything that a rank communicates in one step, in the order of the IR; `program` has been differentiated."""
    assert program.region.kind == "step", f"account: a program after {program.stage} has no step"
    return tuple(_Account(program).within(program.region, (), "step"))


def evaluation(program: Program) -> tuple[Collective, ...]:
    """What `eval_step` communicates: the forward of the same step, and the sums of count and loss."""
    sums = {base(program.region.yields[0].name), base(program.region.yields[2].name)}
    before = {"all_gather"}  # of parameters
    return tuple(
        c
        for c in collectives(program)
        if c.where == "forward" or (c.where == "step" and (base(c.value) in sums or c.op in before))
    )


def parameter_count(program: Program) -> int:
    """The number of parameters of the model, over all ranks, padding left out."""
    return sum(prod(program.valid(dim) for dim in param.type.dims) for param in program.params)


class _Account:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._types = types(program)
        self._loops = Names()

    def within(self, region: Region, loops: tuple[str, ...], where: Where) -> Iterator[Collective]:
        """The collectives of a region whose body runs inside `loops`."""
        for stmt in region.body:
            if isinstance(stmt, Region):
                inside = (*loops, self._loops.fresh(stmt.dim)) if stmt.dim else loops
                yield from self.within(stmt, inside, _BLOCKS.get(stmt.kind, where))
            elif stmt.kind == "coerce" and coercion_of(stmt).collective:
                yield self._collective(stmt, loops, where)

    def _collective(self, op: Op, loops: tuple[str, ...], where: Where) -> Collective:
        axes, source = op.names("axes"), self._types[op.inputs[0]]
        return Collective(
            op=coercion_of(op).collective,
            maximum=ends(op)[0].kind is Kind.MAXIMUM,
            axes=axes,
            ranks=self._program.degree(axes),
            dtype=source.dtype,
            shape=self._program.local_shape(source),
            loops=loops,
            count=prod(self._program.size(base(loop)) for loop in loops),
            where=where,
            value=op.outputs[0].name,
            line=str(op.span),
        )


_BLOCKS: dict[str, Where] = {"forward": "forward", "backward": "backward"}
