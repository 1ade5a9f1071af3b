"""Advice on a plan's time: which plans with one setting changed are faster, and whether they fit.

The fastest that do not fit come with what makes them fit: state that is shared out more, smaller
microbatches.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from attrs import evolve, frozen

from ..analysis.time.report import Neighbour, Report, Room, room
from ..analysis.time.step import step_time
from ..ir import Program
from ..syntax.source import Source
from .neighbours import Change, Changed, changed, more_sharding, neighbours, smaller_microbatches

WORTH = 0.005
"""The least part of a step by which a change makes it shorter that is told."""

COMBINED = 3
"""How many plans that do not fit are tried with another change."""


def advised(it: Report, model: Program, source: Source) -> Report:
    """The report with the neighbours that make its step faster; of a plan that does not fit,
    those too that do.
    """
    found = [*_worth(it, source, ([change] for change in neighbours(model)))]
    large = sorted((other for other in found if other.room.lacks), key=lambda other: other.seconds)
    for other in large[:COMBINED]:
        savings = chain(more_sharding(other.plan.model), smaller_microbatches(other.plan.model))
        both = _worth(it, source, ([*other.plan.changes, change] for change in savings))
        found += sorted((each for each in both if each.room.fits), key=lambda each: each.seconds)[
            :1
        ]
    found.sort(key=lambda other: other.seconds)
    return evolve(
        it,
        neighbours=tuple(
            Neighbour(each.plan.sections, str(each.plan), each.seconds, each.room) for each in found
        ),
    )


@frozen
class _Tried:
    """A plan with changes, its seconds and its memory."""

    plan: Changed
    seconds: float
    room: Room


def _worth(it: Report, source: Source, tried: Iterator[Sequence[Change]]) -> Iterator[_Tried]:
    """The plans that are worth a look.  Memory is counted of those alone that it decides on."""
    for changes in tried:
        if plan := changed(source, changes):
            seconds = step_time(plan.program, it.on).seconds
            faster = seconds < (1 - WORTH) * it.step.seconds
            if faster or it.room.lacks:
                found = _Tried(plan, seconds, room(plan.program))
                if faster or found.room.fits:
                    yield found
