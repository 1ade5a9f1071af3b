"""Chooses how attention comes by other ranks' keys where a plan leaves that open, with `via auto`.

Purpose: of the strategies with which a step fits its GPU, the one that sends least; of those that
send as much, the first of `STRATEGIES`.  Before: `validate`.  Non-goals: seconds, of which sent
bytes are a part.
"""

from collections.abc import Callable, Iterator
from itertools import product

from attrs import evolve

from ..analysis.context_parallel import (
    AUTO,
    STRATEGIES,
    ULYSSES,
    Cost,
    costs,
    sequence_axes,
    strategy,
)
from ..analysis.memory import account, fits
from ..ir import Program
from ..syntax.diagnostics import PlanError


def choose_strategy(program: Program, lowered: Callable[[Program], Program]) -> Program:
    """The program with a strategy in each claim; `lowered` gives that after the last pass.

    Raises PlanError.
    """
    if not any(claim.via == AUTO for claim in program.claims):
        return program
    *found, least = sorted(_variants(program), key=_sent, reverse=True)
    first: Program | None = None
    for variant in (least, *reversed(found)):
        try:
            last = lowered(variant)
        except PlanError:  # two rings, or a ring beside a gather
            continue
        if fits(last, account(last)) is not False:
            return variant
        first = first or variant
    return first or least


def _variants(program: Program) -> Iterator[Program]:
    """With each strategy over each axis; heads may not be divisible, and chunks apart are for
    queries that stay.
    """
    claims = [claim for claim in program.claims if claim.via == AUTO]
    able = [[way for way in STRATEGIES if way != ULYSSES or not claim.zigzag] for claim in claims]
    for ways in product(*able):
        chosen = dict(zip(claims, ways, strict=True))
        made = tuple(
            evolve(each, via=chosen[each]) if each in chosen else each for each in program.claims
        )
        variant = evolve(program, claims=made)
        if all(_costs(variant)):
            yield variant


def _sent(program: Program) -> int:
    """Bytes that all attentions send, each done once."""
    return sum(cost.sent for cost in _costs(program) if cost)


def _costs(program: Program) -> Iterator[Cost | None]:
    """Costs of each attention over each axis by the strategy of its claim; None where it cannot
    go by that.
    """
    for op in program.ops:
        for axis in sequence_axes(program, op):
            own = strategy(program, op, axis)
            yield next((cost for cost in costs(program, op, axis) if cost.strategy == own), None)
