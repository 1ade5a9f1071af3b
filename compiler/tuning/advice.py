"""Advice on a plan's time: which plans with one setting changed are faster, and whether they fit.

The fastest plans that do not fit come with a change that makes them fit: state that is shared out
more, smaller microbatches.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from attrs import evolve, frozen

from ..analysis.time.report import Neighbour, Report, Room, room
from ..ir import Program
from ..syntax.source import Source
from .changes import (
    get_sections,
    make_changed_variant,
    more_sharding,
    neighbours,
    smaller_microbatches,
)
from .variant import Change, Variant

WORTH = 0.005
"""The least part of a step that a change must save."""

COMBINED = 3
"""How many plans that do not fit are tried with another change."""


def make_report_with_advice(report: Report, model: Program, source: Source) -> Report:
    """The report with the neighbours that make its step faster; where the plan does not fit, also
    the neighbours that fit.
    """
    candidates = [*_worth(report, source, ([change] for change in neighbours(model)))]
    large = [candidate for candidate in candidates if candidate.room.lacks]
    large.sort(key=lambda candidate: candidate.seconds)
    for candidate in large[:COMBINED]:
        model, large_changes = candidate.variant.program, candidate.variant.changes
        savings = chain(more_sharding(model), smaller_microbatches(model))
        more_changes = ([*large_changes, saving] for saving in savings)
        combinations = _worth(report, source, more_changes)
        fitting = [combined for combined in combinations if combined.room.fits]
        if fitting:
            candidates.append(min(fitting, key=lambda combined: combined.seconds))
    candidates.sort(key=lambda candidate: candidate.seconds)
    better = list[Neighbour]()
    for candidate in candidates:
        changes = candidate.variant.changes
        words = " with ".join(map(str, changes))
        better.append(Neighbour(get_sections(changes), words, candidate.seconds, candidate.room))
    return evolve(report, neighbours=tuple(better))


@frozen
class _Candidate:
    """A plan with changes, its seconds and its memory."""

    variant: Variant
    seconds: float
    room: Room


def _worth(
    report: Report, source: Source, candidates: Iterator[Sequence[Change]]
) -> Iterator[_Candidate]:
    """The plans that are worth a look: faster ones, and ones that fit where the plan does not."""
    for changes in candidates:
        variant = make_changed_variant(source, changes)
        if not variant:
            continue
        seconds = variant.get_step_time(report.on).seconds
        is_faster = seconds < (1 - WORTH) * report.step.seconds
        # counting memory takes long: not where it decides nothing
        if is_faster or report.room.lacks:
            candidate = _Candidate(variant, seconds, room(variant.last))
            if is_faster or candidate.room.fits:
                yield candidate
