"""What emitted text stands for: local tensors, groups of ranks, rotary tables, placements; and the parts of a step."""

from collections.abc import Mapping

from attrs import frozen

from ...ir import MAXIMUM, Attr, Kind, Op, Placement, Program, Region, Type, sharded, walk
from ...ir.placements import COERCIONS

Groups = tuple[tuple[str, ...], ...]
"""For each dim of a tensor the named dims that are joined in it."""


@frozen
class Local:
    """A local tensor: the IR value that it holds, and its dims."""

    name: str
    groups: Groups

    @property
    def dims(self) -> tuple[str, ...]:
        """The named dims, outermost first."""
        return tuple(dim for group in self.groups for dim in group)


@frozen
class Axes:
    """`mesh.axis(…)`: the group of ranks over these axes, or `mesh.among(…)`: of some of the ranks of one."""

    names: tuple[str, ...]
    among: tuple[str, ...] = ()


@frozen
class Table:
    """`rope_frequencies(…)`: rotary positions."""

    seq: int
    dim: int
    theta: float
    between: int
    dtype: str
    scaling: tuple[tuple[str, Attr], ...] = ()


@frozen
class FlatParams:
    """`state.flat_params(…)`: the flat buffers of buckets of turns, by bucket."""


@frozen
class Buffers:
    """Those of a bucket, one for each turn of the repeats from the one that `level` others are around."""

    bucket: str
    level: int = 0


@frozen
class Stage:
    """The number of the stage that is asked for."""


@frozen
class Entering:
    """What the stage before has made; the first one is given nothing."""


def local(name: str, types: Mapping[str, Type]) -> Local:
    """A value none of whose dims are joined."""
    return Local(name, tuple((dim,) for dim in types[name].dims))


Seen = Local | Axes | Table | FlatParams | Buffers | Stage | Entering | tuple[Local, ...]


def ends_of(function: str, x: Local, options: dict[str, object]) -> list[tuple[Placement, Placement]]:
    """The placements from which and to which a function with these options may lead."""
    if options.get("op", "max") != "max":
        return []
    dims = ("dim_from", "dim_to") if "dim_from" in options else ("dim", "dim")
    return [
        (_placement(source, x, options.get(dims[0])), _placement(target, x, options.get(dims[1])))
        for (source, target), entry in COERCIONS.items()
        if entry.function == function and options.keys() == _options(source, target)
    ]


def _options(source: Kind, target: Kind) -> set[str]:
    if source is target:
        return {"dim_from", "dim_to"}
    if Kind.SHARDED in (source, target):
        return {"dim"}
    return {"op"} if source is Kind.MAXIMUM else set()


def _placement(kind: Kind, x: Local, dim: object) -> Placement:
    """The placement of this kind; none that leads anywhere where there is no such dim."""
    if kind is not Kind.SHARDED:
        return Placement(kind)
    return sharded(x.dims[dim]) if isinstance(dim, int) and 0 <= dim < len(x.dims) else MAXIMUM


def blocks(program: Program) -> tuple[Region, Region, Region]:
    """The step's region of microbatches, and the blocks of forward and backward in it."""
    (region,) = (stmt for stmt in program.region.body if isinstance(stmt, Region))
    forward, backward = region.body
    assert isinstance(forward, Region), "emit: no forward block"
    assert isinstance(backward, Region), "emit: no backward block"
    return region, forward, backward


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
