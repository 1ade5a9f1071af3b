"""Says which programs are legal: run before the first pass and after each.

Purpose: every name bound once and before its use, every op typed as its entry infers, every region's ends matched.
Non-goals: the user's mistakes (`passes.validate`); whatever fails here is a defect of the pass that is named.
"""

from .ir import Arg, Enter, Leave, Op, Program, Region, Type, Value, Yield
from .ops import OPS, TypingError


def check(program: Program) -> None:
    """Asserts that `program` is legal; a failure names the pass that made it."""
    _Scope(program).region(program.region, {p.name: p.type for p in program.params})


class _Scope:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._bound = {p.name for p in program.params}

    def region(self, region: Region, outer: dict[str, Type]) -> dict[str, Type]:
        """Checks a region; returns the names that stay visible after it."""
        here = dict(outer)
        for arg in region.args:
            self._enter(arg, region, outer)
            self._bind(arg.value, here)
        for stmt in region.body:
            if isinstance(stmt, Region):
                here |= self.region(stmt, here)
            else:
                self._op(stmt, here)
        carried = [arg.value.type for arg in region.args if arg.enter is Enter.CARRY]
        assert carried == [here[end.name] for end in region.yields if end.leave is Leave.LAST] or not region.dim, (
            self._at("carries")
        )
        assert len(region.yields) == len(region.results) or region.kind in ("model", "step"), self._at("results")
        after: dict[str, Type] = here if region.kind in ("forward", "backward") else {}
        for end, result in zip(region.yields, region.results, strict=False):
            self._leave(end, result, region, here)
            self._bind(result, after)
        for end in region.yields:
            assert end.name in here, self._at(f"{end.name} is yielded but not bound")
        return after

    def _op(self, op: Op, here: dict[str, Type]) -> None:
        assert op.kind in OPS, self._at(f"there is no op {op.kind}")
        for name in op.inputs:
            assert name in here, self._at(f"{name} is used before it is bound, in {op.kind}")
        try:
            types = OPS[op.kind].infer(self._program, [here[name] for name in op.inputs], op)
        except TypingError as error:
            raise AssertionError(self._at(f"{error} ({op.outputs[0].name if op.outputs else op.kind})")) from None
        assert len(types) == len(op.outputs), self._at(f"{op.kind} has {len(types)} results, not {len(op.outputs)}")
        for value, type in zip(op.outputs, types, strict=True):
            assert value.type == type, self._at(f"{value.name} is {value.type}, but {op.kind} makes {type}")
            self._bind(value, here)

    def _enter(self, arg: Arg, region: Region, outer: dict[str, Type]) -> None:
        if region.kind in ("model", "step"):
            return
        assert arg.source in outer, self._at(f"{arg.source} enters a region before it is bound")
        source = outer[arg.source]
        assert arg.enter is not Enter.EACH or source.dims[:1] == (region.dim,), self._at(f"{arg.source} has no slices")
        expected = source.inside(region.dim) if arg.enter is Enter.EACH else source
        assert arg.value.type == expected, self._at(f"{arg.value.name} is {arg.value.type}, not {expected}")

    def _leave(self, end: Yield, result: Value, region: Region, here: dict[str, Type]) -> None:
        inner = here[end.name]
        expected = inner.stacked(region.dim) if end.leave is Leave.STACK else inner
        assert result.type == expected, self._at(f"{result.name} is {result.type}, not {expected}")

    def _bind(self, value: Value, here: dict[str, Type]) -> None:
        assert value.name not in self._bound, self._at(f"{value.name} is bound twice")
        assert all(place.dim in ("", *value.type.dims) for _, place in value.type.places), self._at(
            f"{value.name}: shards no dim of its own"
        )
        self._bound.add(value.name)
        here[value.name] = value.type

    def _at(self, what: str) -> str:
        return f"{self._program.stage}: {what}"
