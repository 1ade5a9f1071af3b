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
    claims = [
        part
        for claim in program.claims
        for part in _split(claim, factors[claim.axis], program.size(claim.dim))
    ]
    axes = tuple(axis for group in factors.values() for axis in group)

    def over(state: StateAxes, kind: str) -> tuple[str, ...]:
        return tuple(factor.name for name in getattr(state, kind) for factor in factors[name])

    state = tuple(
        evolve(each, **{kind: over(each, kind) for kind in STATES}) for each in program.state
    )
    return evolve(program, axes=axes, claims=tuple(claims), state=state)


def _factors(axis: Axis, program: Program) -> tuple[Axis, ...]:
    claims = [claim for claim in program.claims if claim.axis == axis.name]
    claimed = {program.size(claim.dim) for claim in claims}
    if any(claim.via == ULYSSES for claim in claims):
        claimed |= {
            heads_left(program, dim) for op in program.ops for dim in attention_heads(program, op)
        }
    ends = [*sorted(size for size in claimed if size < axis.size), axis.size]
    sizes = [
        size for start, end in zip([1, *ends], ends, strict=False) if (size := end // start) > 1
    ]
    if len(sizes) < 2:
        return (axis,)
    stem, others = axis.name, {other.name for other in program.axes}
    while any(f"{stem}_{i}" in others for i in range(len(sizes))):
        stem += "_"
    return tuple(
        Axis(f"{stem}_{i}", size, axis.name, span=axis.span) for i, size in enumerate(sizes)
    )


def _split(claim: Claim, factors: tuple[Axis, ...], size: int) -> list[Claim]:
    """The claim over each factor, split as long as the dim fills the factors so far."""
    claims: list[Claim] = []
    filled = 1
    for factor in factors:
        filled *= factor.size
        claims.append(evolve(claim, axis=factor.name, split=filled <= size))
    return claims
