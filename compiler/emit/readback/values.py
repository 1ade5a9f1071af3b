"""What emitted text stands for: local tensors, groups of ranks, rotary tables; and the blocks of a step."""

from collections.abc import Mapping

from attrs import frozen

from ...ir import Program, Region, Type

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
    """`mesh.axis(…)`: the group of ranks over these axes."""

    names: tuple[str, ...]


@frozen
class Table:
    """`rope_table(…)`: rotary positions."""

    seq: int
    dim: int
    theta: float
    between: int
    dtype: str


def local(name: str, types: Mapping[str, Type]) -> Local:
    """A value none of whose dims are joined."""
    return Local(name, tuple((dim,) for dim in types[name].dims))


Seen = Local | Axes | Table | tuple[Local, ...]


def blocks(program: Program) -> tuple[Region, Region, Region]:
    """The step's region of microbatches, and the blocks of forward and backward in it."""
    (region,) = (stmt for stmt in program.region.body if isinstance(stmt, Region))
    forward, backward = region.body
    assert isinstance(forward, Region), "emit: no forward block"
    assert isinstance(backward, Region), "emit: no backward block"
    return region, forward, backward
