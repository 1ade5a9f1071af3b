"""Turns chains of `+` through single-use names into sums of many operands.

Purpose: pending operands of one sum are then reduced together, once (a parallel attention and MLP block halves its
collectives).  Before: any program.  Non-goals: other rewrites of the user's arithmetic.
"""

from collections import Counter

from attrs import evolve

from ..ir import Op, Program, Region, Stmt, walk


def flatten_sums(program: Program) -> Program:
    """The program with nested sums flattened."""
    uses = Counter(name for op in walk(program.region.body) for name in op.inputs)
    return evolve(program, region=_flatten(program.region, uses))


def _flatten(region: Region, uses: Counter[str]) -> Region:
    uses = uses + Counter(end.name for end in region.yields)
    sums: dict[str, Op] = {}
    body: list[Stmt] = []
    for stmt in region.body:
        if isinstance(stmt, Region):
            body.append(_flatten(stmt, uses))
        elif stmt.kind == "add":
            inlined = tuple(part for name in stmt.inputs for part in (sums[name].inputs if name in sums else (name,)))
            body = [
                s for s in body if not (isinstance(s, Op) and s.outputs[0].name in stmt.inputs and s in sums.values())
            ]
            flat = evolve(stmt, inputs=inlined)
            body.append(flat)
            if uses[flat.outputs[0].name] == 1:
                sums[flat.outputs[0].name] = flat
        else:
            body.append(stmt)
    return evolve(region, body=tuple(body))
