"""Layers chains of `+` through single-use names into sums of many operands.

Purpose: pending operands of one sum are then reduced together, once (a parallel attention and MLP
block halves its collectives).  Before: any program.  Non-goals: other rewrites of the user's
arithmetic.
"""

from collections import Counter

from attrs import evolve

from ..ir import Op, Program, Region, Stmt, uses

MOST = 64
"""The most operands that a sum takes over, so that no emitted expression nests without bound."""


def flatten_sums(program: Program) -> Program:
    """The program with nested sums flattened."""
    return evolve(program, region=_flatten(program.region, uses(program.region)))


def _flatten(region: Region, count: Counter[str]) -> Region:
    body: dict[str, Stmt] = {}
    for number, stmt in enumerate(region.body):
        if isinstance(stmt, Region):
            body[str(number)] = _flatten(stmt, count)
        else:
            terms = list[str]()
            if stmt.kind == "add":
                for name in stmt.inputs:
                    terms += _terms(name, body, count)
            else:
                terms += stmt.inputs
            body[stmt.outputs[0].name] = evolve(stmt, inputs=tuple(terms))
    return evolve(region, body=tuple(body.values()))


def _terms(name: str, body: dict[str, Stmt], count: Counter[str]) -> tuple[str, ...]:
    """The terms of the sum `name`, if only this use reads it; the sum is then taken out of
    `body`.
    """
    stmt = body.get(name)
    if isinstance(stmt, Op) and stmt.kind == "add" and count[name] == 1 and len(stmt.inputs) < MOST:
        del body[name]
        return stmt.inputs
    return (name,)
