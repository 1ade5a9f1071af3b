"""Chooses how each parameter gets from its state of record to its uses, and its gradient back:
chains with scopes.

Purpose: `leaf` becomes casts and coercions at step scope; the cast of a gradient goes into the
microbatch, so that sums over microbatches and ranks are in the state's element type, and its
reduction stays at step scope: one per step.  Before: `differentiate`.  Non-goals: joining
reductions (`fuse_buckets`).
"""

from attrs import evolve

from ..ir import Op, Program, Region, Value, Yield, blocks, ops_in, rename
from ..ir.placements import path
from ..ops.builder import OpBuilder


def place_state(program: Program) -> Program:
    """The program with every leaf's chain chosen."""
    return evolve(program, region=_Chains(program).region())


class _Chains(OpBuilder):
    def region(self) -> Region:
        step = self.program.region
        same: dict[str, str] = {}  # the other name of a leaf or gradient without a chain
        for stmt in step.body:
            if isinstance(stmt, Region):
                self.body.append(self._cast_gradients(stmt))
            elif stmt.kind not in ("leaf", "leaf_grad"):
                self.body.append(stmt)
            elif chain := self._chain(stmt):
                self.body += chain
            else:
                same[stmt.outputs[0].name] = stmt.inputs[0]
        return rename(evolve(step, body=tuple(self.body)), same)

    def _chain(self, op: Op) -> list[Op]:
        """Coercions in the wider element type, then the cast; ends in the name that `op` bound."""
        builder, (name,), (due,) = self.inner(), op.inputs, op.outputs
        builder.span = op.span
        for step in path(self.program, self.types[name], due.type.places):
            name = builder.coerce(name, step)
        builder.cast(name, due.type.dtype)
        ops = ops_in(builder.body)
        if ops:
            ops[-1] = evolve(ops[-1], outputs=op.outputs)
        return ops

    def _cast_gradients(self, region: Region) -> Region:
        """The microbatches' region with gradients cast to the element type of the state before
        they are summed.
        """
        builder, (forward, backward) = self.inner(), blocks(region)
        wide = {param.type.dtype for param in self.program.params}
        ends: list[Yield] = []
        for end in region.yields:
            type = self.types[end.name]
            if type.differentiable and type.dtype not in wide and type.dims:
                end = evolve(end, name=builder.cast(end.name, min(wide)))
            ends.append(end)
        results = tuple(
            Value(result.name, self.types[end.name])
            for result, end in zip(region.results, ends, strict=True)
        )
        self.types.update((value.name, value.type) for value in results)
        backward = evolve(backward, body=(*backward.body, *builder.body))
        return evolve(region, body=(forward, backward), yields=tuple(ends), results=results)
