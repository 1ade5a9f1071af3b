"""Regions: how they nest, what enters and leaves them, and that each name is bound once before
its use.
"""

from collections import Counter

from attrs import evolve

from ...ir import (
    MICROBATCHES,
    PARTIAL,
    Arg,
    Enter,
    Leave,
    Op,
    Program,
    Region,
    Type,
    Value,
    Yield,
    ops_in,
    regions_in,
    uses,
)
from ...ops import OPS
from ...ops.protocol import begins
from ...syntax.limits import MAX_DEPTH
from .checker import STEP_PASSES, Checker
from .ops import Ops

INSIDE: dict[str, tuple[str, ...]] = {
    "model": ("repeat",),
    "step": (MICROBATCHES,),
    "microbatches": ("forward", "backward"),
    "forward": ("repeat",),
    "backward": ("repeat",),
    "repeat": ("repeat",),
}
"""The kinds of regions that may be directly in each kind."""


class Regions(Checker):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._bound = {param.name for param in program.params_and_buffers}
        self._ops = Ops(program)
        self._params = {param.name: param.type for param in program.params}
        self._depth = 0
        self._reversed = 0  # how many reversed repeats are around

    def outermost(self) -> None:
        """Checks the program's region, and its content by the last pass."""
        region = self.program.region
        kind = "step" if self.program.after in STEP_PASSES else "model"
        assert region.kind == kind, f"a program after this pass is a {kind}, not a {region.kind}"
        self.region(region, {param.name: param.type for param in self.program.params_and_buffers})
        lasts = all(end.leave is Leave.LAST for end in region.yields)
        assert lasts, f"a {kind} yields last values"
        assert not region.results, f"a {kind} has results"
        if kind == "model":
            leaves = [op.inputs[0] for op in ops_in(region.body) if op.kind == "leaf"]
            assert leaves == [*self._params], "leaves and parameters differ"
            assert self.program.losses in (1, 2), "a model yields its losses"
        else:
            inner = regions_in(region.body)
            assert len(inner) == 1, "a step has one region of all microbatches"
            blocks = [stmt.kind for stmt in inner[0].body]
            assert blocks == ["forward", "backward"], (
                "microbatches are one forward and one backward"
            )
            assert self.program.losses in (1, 2), (
                "a step yields losses, norm, count, loads and its parameters"
            )

    def region(self, region: Region, outer: dict[str, Type]) -> dict[str, Type]:
        """Checks a region; returns the names that stay visible after it."""
        self._head(region)
        here = dict(outer)
        for arg in region.args:
            self._enter(arg, region, outer)
            self._bind(arg.value, here)
        self._body(region, here)
        for end in region.yields:
            assert end.name in here, f"{end.name} is yielded but not bound"
        carried = [arg.value.type for arg in region.args if arg.enter is Enter.CARRY]
        lasts = [here[end.name] for end in region.yields if end.leave is Leave.LAST]
        assert carried == lasts or not region.dim, "carries"
        assert len(region.yields) == len(region.results) or region.kind in ("model", "step"), (
            "results"
        )
        after: dict[str, Type] = here if region.kind in ("forward", "backward") else {}
        for end, result in zip(region.yields, region.results, strict=False):
            self._leave(end, result, region, here)
            self._bind(result, after)
        return after

    def _head(self, region: Region) -> None:
        assert self._depth < MAX_DEPTH, f"regions nest deeper than {MAX_DEPTH}"
        looped = region.kind in ("repeat", MICROBATCHES)
        assert bool(region.dim) == looped, f"a {region.kind} over {region.dim or 'nothing'}"
        assert not looped or region.dim in self.sizes, f"{region.dim} is not declared"
        assert (region.kind == MICROBATCHES) == (region.dim == MICROBATCHES), (
            f"a {region.kind} over {region.dim}"
        )
        assert not region.reverse or region.kind == "repeat", f"a {region.kind} reversed"
        takes = region.args or region.yields or region.results
        assert not takes or region.kind not in ("forward", "backward"), (
            f"{region.kind} takes nothing"
        )

    def _body(self, region: Region, here: dict[str, Type]) -> None:
        self._depth += 1
        self._reversed += region.reverse
        for stmt in region.body:
            if isinstance(stmt, Region):
                assert stmt.kind in INSIDE[region.kind], f"a {stmt.kind} in a {region.kind}"
                here |= self.region(stmt, here)
            else:
                self._op(stmt, here)
        self._under_way(region)
        self._depth -= 1
        self._reversed -= region.reverse

    def _under_way(self, region: Region) -> None:
        """Only a `wait` of the same body reads what is under way, and it reads nothing else."""
        begun, awaited = list[str](), list[str]()
        for op in ops_in(region.body):
            if begins(op):
                begun.append(op.outputs[0].name)
            if OPS[op.kind].awaits:
                awaited.append(op.inputs[0])
        assert Counter(begun) == Counter(awaited), f"{begun} are under way, and {awaited} awaited"
        counts = uses(region) if begun else Counter[str]()
        assert all(counts[name] == 1 for name in begun), (
            f"of {begun} some are read before they have come"
        )

    def _op(self, op: Op, here: dict[str, Type]) -> None:
        types = self._ops.check(op, here, self._reversed > 0)
        for value, type in zip(op.outputs, types, strict=True):
            assert value.type == type, f"{value.name} is {value.type}, but {op.kind} makes {type}"
            self._bind(value, here)

    def _enter(self, arg: Arg, region: Region, outer: dict[str, Type]) -> None:
        if region.kind in ("model", "step"):
            assert arg.source == arg.value.name, f"{arg.value.name} is made from {arg.source}"
            assert arg.enter is Enter.EACH, f"{arg.value.name} is carried into a {region.kind}"
            return
        assert arg.source in outer, f"{arg.source} enters a region before it is bound"
        source = outer[arg.source]
        assert arg.enter is not Enter.EACH or source.dims[:1] == (region.dim,), (
            f"{arg.source} has no slices"
        )
        expected = source
        if arg.enter is Enter.EACH:
            expected = source.inside(region.dim)
        assert arg.value.type == expected, f"{arg.value.name} is {arg.value.type}, not {expected}"

    def _leave(self, end: Yield, result: Value, region: Region, here: dict[str, Type]) -> None:
        inner, pipeline = here[end.name], self.program.pipeline
        expected = inner
        if end.leave is Leave.STACK:
            expected = inner.stack_along(region.dim)
        if region.kind == MICROBATCHES and pipeline and pipeline.axis in dict(result.type.places):
            # each rank has the sum of its own stages
            places = dict(inner.places) | {pipeline.axis: PARTIAL}
            expected = evolve(expected, places=self.program.places(places))
        assert result.type == expected, f"{result.name} is {result.type}, not {expected}"

    def _bind(self, value: Value, here: dict[str, Type]) -> None:
        assert value.name not in self._bound, f"{value.name} is bound twice"
        self.type(value.name, value.type)
        self._bound.add(value.name)
        here[value.name] = value.type
