"""Where in the step a parameter of a repeat is used: the repeat of forward that takes its slices,
and the repeat of backward that does.

Purpose: the places of a bucket per layer, which gathers its parameters where a layer begins and
reduces their gradients where its backward ends.  A parameter that has several uses, or not only by
slices, has no such loops.  Non-goals: the ops put there (`comms`).
"""

from collections import Counter
from collections.abc import Sequence

from attrs import evolve, frozen

from ...ir import (
    Arg,
    Enter,
    Leave,
    Region,
    Stmt,
    Value,
    Yield,
    blocks,
    defs,
    regions_in,
    uses,
)

Path = tuple[int, ...]
"""Which region of a body, counted among its regions, then which of that one's, and so on."""


@frozen
class ParamLoops:
    """The regions of forward and backward that give each layer its slice of a parameter.

    `weight` is a layer's slice in forward and `regathered` the one in backward, "" where that reads
    none; `slices` are their names at each level.  `sums` are the values between a layer's
    `gradient` and the microbatch's.
    """

    forward: Path
    backward: Path
    weight: str
    regathered: str
    slices: tuple[str, ...]
    gradient: str
    sums: tuple[str, ...]

    @property
    def place(self) -> tuple[Path, Path]:
        """The loops that parameters of one bucket share."""
        return self.forward, self.backward


class LoopFinder:
    """Finds the loops of the parameters of a step's microbatches."""

    def __init__(self, microbatches: Region) -> None:
        self._forward, self._backward = blocks(microbatches)
        self._made_by = defs(self._backward.body)
        self._read_backward = uses(self._backward)
        self._uses: dict[int, Counter[str]] = {}
        """How often each value is read, by the id of the body: many parameters ask for the same
        bodies.
        """

    def loops(self, leaf: str, gradient: str) -> ParamLoops | None:
        """The loops of the parameter that is used as `leaf`, with the gradient `gradient` in a
        microbatch.
        """
        forward, backward = self._forward, self._backward
        cast = self._made_by.get(gradient)
        stack = cast.inputs[0] if cast and cast.kind == "cast" else gradient
        taken, second = self._slices(forward.body, leaf), self._slices(backward.body, leaf)
        layer = _layer(backward.body, stack)
        if not taken or not layer or (second and second[0] != layer[0]):
            return None
        if self._read_backward[leaf] != bool(second):
            return None
        slices = taken[1]
        regathered = ""
        if second:
            slices += second[1]
            regathered = second[1][-1]
        sums = (*{gradient, stack}, *layer[1][1:-1])
        return ParamLoops(taken[0], layer[0], taken[1][-1], regathered, slices, layer[1][-1], sums)

    def _slices(self, body: tuple[Stmt, ...], name: str) -> tuple[Path, tuple[str, ...]] | None:
        """The path to the one place that takes slices of a value, of slices of it and so on,
        and their names.
        """
        takers = list[tuple[int, Arg]]()
        for i, region in enumerate(regions_in(body)):
            for arg in region.args:
                if arg.source == name:
                    takers.append((i, arg))
        if len(takers) != 1 or takers[0][1].enter is not Enter.EACH:
            return None
        if self._uses_in(body)[name] != 1:
            return None
        index, arg = takers[0]
        inner = self._slices(regions_in(body)[index].body, arg.value.name)
        if inner is None:
            return (index,), (arg.value.name,)
        return (index, *inner[0]), (arg.value.name, *inner[1])

    def _uses_in(self, body: tuple[Stmt, ...]) -> Counter[str]:
        if id(body) not in self._uses:
            self._uses[id(body)] = uses(*body)
        return self._uses[id(body)]


def _layer(body: Sequence[Stmt], name: str) -> tuple[Path, tuple[str, ...]] | None:
    """The path to the layer that makes the slices of a stack, and the names from the stack to
    the slice.
    """
    for i, region in enumerate(regions_in(body)):
        for end, result in zip(region.yields, region.results, strict=True):
            if result.name == name and end.leave is Leave.STACK:
                inner = _layer(region.body, end.name)
                if inner is None:
                    return (i,), (name, end.name)
                path, names = inner
                return (i, *path), (name, *names)
    return None


def without(region: Region, gone: set[str]) -> Region:
    """The region without what binds these names, at any depth."""
    body = list[Stmt]()
    for stmt in region.body:
        if isinstance(stmt, Region):
            body.append(without(stmt, gone))
        elif gone.isdisjoint(value.name for value in stmt.outputs):
            body.append(stmt)
    args = tuple(arg for arg in region.args if arg.value.name not in gone)
    region = evolve(region, body=tuple(body), args=args)
    if not region.results:
        return region
    yields, results = list[Yield](), list[Value]()
    for end, value in zip(region.yields, region.results, strict=False):
        if value.name not in gone:
            yields.append(end)
            results.append(value)
    return evolve(region, yields=tuple(yields), results=tuple(results))
