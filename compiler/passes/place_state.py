"""Chooses how each parameter gets from its state of record to its uses, and its gradient back: chains with scopes.

Purpose: `leaf` becomes casts and coercions at step scope; the cast of a gradient goes into the microbatch, so that sums
over microbatches and ranks are in the state's element type, and its reduction stays at step scope: one per step.
A scope is where an op stands.  Before: `differentiate`.  Non-goals: joining reductions (`fuse_buckets`).
"""

from attrs import evolve

from ..ir import Names, Op, Program, Region, Stmt, Type, Value, Yield, blocks, rename
from ..ir.placements import path


def place_state(program: Program) -> Program:
    """The program with every leaf's chain chosen."""
    return evolve(program, region=_Chains(program).region())


class _Chains:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._params = {p.name: p.type for p in program.params}
        self._names = Names(program.types)
        self._same: dict[str, str] = {}  # what a leaf or gradient without a chain is another name for
        self._types: dict[str, Type] = dict(self._params)

    def region(self) -> Region:
        region = self._program.region
        body: list[Stmt] = []
        for stmt in region.body:
            if isinstance(stmt, Region):
                body.append(self._cast_gradients(stmt))
            elif stmt.kind == "leaf":
                body += self._chain(stmt, self._params[stmt.inputs[0]], stmt.outputs[0].type)
            elif stmt.kind == "leaf_grad":
                body += self._chain(stmt, self._types[stmt.inputs[0]], stmt.outputs[0].type)
            else:
                body.append(stmt)
        return rename(evolve(region, body=tuple(body)), self._same)

    def _chain(self, op: Op, source: Type, target: Type) -> list[Op]:
        """Coercions in the wider element type, then the cast; ends in the name that `op` bound."""
        steps = path(self._program, source, target.places)
        ops: list[Op] = []
        for step in steps:
            name = ops[-1].outputs[0].name if ops else op.inputs[0]
            source = step.applied(source, self._program)
            ops.append(step.op(name, Value(self._names.fresh(name), source), op.span))
        if source.dtype != target.dtype:
            name = ops[-1].outputs[0].name if ops else op.inputs[0]
            ops.append(
                Op("cast", (name,), (Value(self._names.fresh(name), target),), (("dtype", target.dtype),), span=op.span)
            )
        if not ops:
            self._same[op.outputs[0].name] = op.inputs[0]
            return []
        ops[-1] = evolve(ops[-1], outputs=op.outputs)
        return ops

    def _cast_gradients(self, region: Region) -> Region:
        """The microbatches' region with gradients cast to the element type of the state before they are summed."""
        forward, backward = blocks(region)
        wide = {p.type.dtype for p in self._program.params}
        casts: list[Op] = []
        ends: list[Yield] = []
        results: list[Value] = []
        for end, result in zip(region.yields, region.results, strict=True):
            if result.type.dtype not in wide and result.type.dims:
                type = evolve(result.type, dtype=next(iter(wide)))
                value = Value(self._names.fresh(end.name), type)
                casts.append(Op("cast", (end.name,), (value,), (("dtype", type.dtype),), span=region.span))
                end, result = evolve(end, name=value.name), Value(result.name, type)
            self._types[result.name] = result.type
            ends.append(end)
            results.append(result)
        backward = evolve(backward, body=(*backward.body, *casts))
        return evolve(region, body=(forward, backward), yields=tuple(ends), results=tuple(results))
