"""Checks that the gradient reductions started per layer add up to the reduction of the step.

Non-goals: everything else that makes a program legal (`wellformed`).
"""

from collections.abc import Iterator

from attrs import frozen

from ...ir import Leave, Program, ops_in, walk_regions


def misbegun(program: Program) -> Iterator[str]:
    """Words for each `begin` that does not begin what its bucket's `pack` waits for, or that is not alone in it."""
    params = {param.name for param in program.params}
    packs = [op for op in ops_in(program.region.body) if op.kind == "pack"]
    waiting = {op.get("bucket"): op.inputs for op in packs if op.inputs[0] not in params}
    origins, seen = _Origins.of(program), set[object]()
    for region in walk_regions([program.region]):
        for op in (op for op in ops_in(region.body) if op.kind == "begin"):
            name = op.get("bucket")
            layers = len(program.bucket(str(name)).layers)
            complete = tuple(origins.layer(packed, layers) for packed in waiting.get(name, ()))
            if name in seen or complete != op.inputs or not {*op.inputs} <= {end.name for end in region.yields}:
                yield f"begin of {name} is not of what the step packs"
            seen.add(name)


@frozen
class _Origins:
    """Where values come from: results of regions from what their layers yield, casts from their operands."""

    ends: dict[str, tuple[Leave, str]]
    casts: dict[str, str]

    @classmethod
    def of(cls, program: Program) -> "_Origins":
        ends = {
            result.name: (end.leave, end.name)
            for region in walk_regions([program.region])
            for end, result in zip(region.yields, region.results, strict=False)
        }
        return cls(ends, {op.outputs[0].name: op.inputs[0] for op in program.ops if op.kind == "cast"})

    def layer(self, name: str, layers: int) -> str:
        """What a layer yields of a stack of so many repeats' layers that microbatches sum; "" of anything else."""
        for leave in (Leave.SUM, *[Leave.STACK] * layers):
            while leave is Leave.STACK and name in self.casts:
                name = self.casts[name]
            found, name = self.ends.get(name, (None, ""))
            if found is not leave:
                return ""
        return name
