"""Factors a mesh axis over which a dim is too small, as key/value heads often are for tensor
parallelism.

Purpose: with 2 key/value heads over tp = 8, tp becomes tp_0 = 2 × tp_1 = 4.  Every dim over tp
works over both factors, the key/value heads over tp_0 alone, and on tp_1 their ops work
replicated.  The small dim is the outer factor, so that the query heads of one rank all use the
key/value heads it holds.  Before: `resolve`.  Non-goals: dims that an axis does not divide at all
(`validate` has reported them).
"""

from attrs import evolve

from ..analysis.context_parallel import ULYSSES, attention_heads, heads_left
from ..ir import STATES, Axis, Claim, Program, StateAxes


def factor_axes(program: Program) -> Program:
    """The program with axes factored where a claiming dim is smaller than the axis."""
    factors = {axis.name: _factors(axis, program) for axis in program.axes}
    claims = list[Claim]()
    for claim in program.claims:
        claims += _split(claim, factors[claim.axis], program.size(claim.dim))
    axes = tuple(axis for group in factors.values() for axis in group)
    states = list[StateAxes]()
    for state in program.state:
        over = dict[str, tuple[str, ...]]()
        for kind in STATES:
            names = list[str]()
            for axis in getattr(state, kind):
                names += (factor.name for factor in factors[axis])
            over[kind] = tuple(names)
        states.append(evolve(state, **over))
    return evolve(program, axes=axes, claims=tuple(claims), state=tuple(states))


def _factors(axis: Axis, program: Program) -> tuple[Axis, ...]:
    claims = [claim for claim in program.claims if claim.axis == axis.name]
    claimed = {program.size(claim.dim) for claim in claims}
    if any(claim.via == ULYSSES for claim in claims):
        for op in program.ops:
            claimed |= {heads_left(program, dim) for dim in attention_heads(program, op)}
    ends = [*sorted(size for size in claimed if size < axis.size), axis.size]
    sizes = list[int]()
    start = 1
    for end in ends:
        if end // start > 1:
            sizes.append(end // start)
        start = end
    if len(sizes) < 2:
        return (axis,)
    stem, others = axis.name, {other.name for other in program.axes}
    while any(f"{stem}_{i}" in others for i in range(len(sizes))):
        stem += "_"
    factors = list[Axis]()
    for i, size in enumerate(sizes):
        factors.append(Axis(f"{stem}_{i}", size, axis.name, span=axis.span))
    return tuple(factors)


def _split(claim: Claim, factors: tuple[Axis, ...], size: int) -> list[Claim]:
    """The claim over each factor, split as long as the dim fills the factors so far."""
    claims: list[Claim] = []
    filled = 1
    for factor in factors:
        filled *= factor.size
        claims.append(evolve(claim, axis=factor.name, split=filled <= size))
    return claims
