"""Advice on a plan's time: which plans with one setting changed are faster, and whether they fit."""

from collections.abc import Iterator

from attrs import evolve

from ..analysis.time.report import Neighbour, Report, room
from ..analysis.time.step import step_time
from ..ir import Program
from ..syntax.source import Source
from .neighbours import changed, neighbours

WORTH = 0.005
"""The least part of a step by which a change makes it shorter that is told."""


def advised(it: Report, model: Program, source: Source) -> Report:
    """The report with the neighbours that make its step faster; of a plan that does not fit, those too that do."""
    return evolve(it, neighbours=tuple(sorted(_worth(it, model, source), key=lambda other: other.seconds)))


def _worth(it: Report, model: Program, source: Source) -> Iterator[Neighbour]:
    """Memory is counted of those alone that it decides on."""
    for change in neighbours(model):
        if other := changed(source, [change]):
            seconds = step_time(other.program, it.on).seconds
            faster = seconds < (1 - WORTH) * it.step.seconds
            if faster or not it.room.fits:
                found = Neighbour(change.section, change.content, str(change), seconds, room(other.program))
                if faster or found.room.fits:
                    yield found
