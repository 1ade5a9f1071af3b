"""Chooses how attention comes by other ranks' keys where a plan leaves that open, with `via auto`.

Purpose: of the strategies with which a step fits its GPU, the one that sends least; of strategies
that send as much, the first of `STRATEGIES`.  Before: `validate`.  Non-goals: seconds; sent bytes
are only a part of them.
"""

from collections.abc import Iterator
from itertools import product

from attrs import evolve

from ...analysis.context_parallel import (
    AUTO,
    STRATEGIES,
    ULYSSES,
    Cost,
    costs,
    sequence_axes,
    strategy,
)
from ...ir import Claim, Program
from ..variant import Variant


def choose_strategy(plan: Variant) -> Variant:
    """The variant with a strategy in each claim."""
    if not any(claim.via == AUTO for claim in plan.program.claims):
        return plan
    # reversed twice: of programs that send as much the first stays first
    *others, least = sorted(_with_strategies(plan.program), key=_bytes_sent, reverse=True)
    variants = [plan.with_program(program) for program in (least, *reversed(others))]
    first: Variant | None = None
    for variant in variants:
        if not variant.is_plan:  # two rings, or a ring beside a gather
            continue
        if variant.fits is not False:
            return variant
        first = first or variant
    return first or variants[0]


def _with_strategies(program: Program) -> Iterator[Program]:
    """With each strategy over each axis; heads may not be divisible, and chunks apart are for
    queries that stay.
    """
    open_claims = [claim for claim in program.claims if claim.via == AUTO]
    strategies = list[list[str]]()
    for claim in open_claims:
        # heads are not exchanged for chunks
        strategies.append([way for way in STRATEGIES if way != ULYSSES or not claim.zigzag])
    for ways in product(*strategies):
        chosen = dict(zip(open_claims, ways, strict=True))
        claims = list[Claim]()
        for claim in program.claims:
            if claim in chosen:
                claim = evolve(claim, via=chosen[claim])
            claims.append(claim)
        variant = evolve(program, claims=tuple(claims))
        if all(_costs(variant)):
            yield variant


def _bytes_sent(program: Program) -> int:
    """Bytes that all attentions send, each done once."""
    return sum(cost.sent_bytes for cost in _costs(program) if cost)


def _costs(program: Program) -> Iterator[Cost | None]:
    """Costs of each attention over each axis by the strategy of its claim; None where it cannot
    go by that.
    """
    for op in program.ops:
        for axis in sequence_axes(program, op):
            chosen = strategy(program, op, axis)
            yield next((cost for cost in costs(program, op, axis) if cost.strategy == chosen), None)
