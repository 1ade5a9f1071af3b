"""Memory of a rank over a step by owner, in the numbers of `scalec explain memory`."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from attrs import frozen

from ...analysis.expert_loads import with_room
from ...analysis.memory import Account, PeakSnapshot, account, capacity, fits, place
from ...analysis.memory.over_step import over_microbatch
from ...analysis.memory.pipeline_peak import over_row
from ...config.units import amount
from ...ir import MICROBATCHES, Program
from ...schedules.timeline import Timeline
from ..drawing import columns
from ..explain import moment
from .subject import Subject

COLUMNS = 480
"""How many moments are drawn at most: of those that share a column, the one with most in memory."""


@frozen
class Owner:
    """Bytes of one owner in each moment, and the number of the series that it is drawn as."""

    name: str
    series: int
    bytes: tuple[int, ...]


@frozen
class Memory:
    """Owners from the bottom to the top, in moments that begin at `xs`, from 0 to 1.

    scale     what the horizontal axis is, a sentence
    phases    parts of the step, each with where it begins
    peak      which moment is the peak, and its name
    needs     bytes at the peak, reserve included
    """

    whose: str
    verdict: str
    scale: str
    owners: tuple[Owner, ...]
    xs: tuple[float, ...]
    phases: tuple[tuple[str, float], ...]
    peak: int
    peak_words: str
    needs: int
    capacity: int | None

    @property
    def passing(self) -> tuple[Owner, ...]:
        """Owners of what comes and goes."""
        return tuple(owner for owner in self.owners if len({*owner.bytes}) > 1)


def memory(of: Subject, timeline: Timeline | None) -> Memory:
    """The memory of the rank that needs most; `timeline` is that of a pipeline."""
    program, it = of.program, account(of.program)
    found = _microbatch(program) if timeline is None else _row(program, it, timeline)
    kept = [found[at] for at in columns([(x, each.bytes) for x, each in found], COLUMNS)]
    shown, places = [each for _, each in kept], [x for x, _ in kept]
    peak = max(range(len(shown)), key=lambda at: shown[at].bytes)
    return Memory(
        place(program, it),
        _verdict(program, it),
        _scale(program),
        (*_always(it, len(shown)), *_passing(shown)),
        tuple(places),
        _phases(shown, places) if timeline is None else (),
        peak,
        moment(it.peak),
        it.needs,
        capacity(program),
    )


def _verdict(program: Program, it: Account) -> str:
    """For instance `fits: 57.0 GiB of 80.0 GiB`."""
    room = capacity(program)
    if room is None:
        return f"needs {amount(it.needs)}"
    return f"{'fits' if fits(program, it) else 'does not fit'}: {amount(it.needs)} of {amount(room)}"


def _always(it: Account, moments: int) -> list[Owner]:
    """Owners of what is there for the whole step."""
    parts = [(b.parameters, b.masters, b.gradients) for b in it.buckets]
    parameters, masters, gradients = (sum(each) for each in zip(*parts, strict=True)) if parts else (0, 0, 0)
    sizes = (
        ("reserve", 7, it.reserve),
        ("parameters", 0, parameters),
        ("masters", 6, masters),
        ("gradients", 2, gradients),
        ("optimizer", 3, it.state - parameters - masters - gradients),
        ("inputs, tables", 7, it.inputs + it.tables),
    )
    return [Owner(name, series, (size,) * moments) for name, series, size in sizes if size]


_PASSING: tuple[tuple[str, int, Callable[[PeakSnapshot], int]], ...] = (
    ("unsharded weights", 4, lambda it: it.weights),
    ("unsharded gradients", 5, lambda it: it.gradients),
    ("saved activations", 1, lambda it: it.kept),
    ("temporaries", 5, lambda it: it.other),
)
"""Owners of what comes and goes, and their series."""


def _passing(shown: Sequence[PeakSnapshot]) -> list[Owner]:
    found = [Owner(name, series, tuple(map(size, shown))) for name, series, size in _PASSING]
    return [owner for owner in found if any(owner.bytes)]


def _microbatch(program: Program) -> list[tuple[float, PeakSnapshot]]:
    moments = over_microbatch(program)
    return [(at / len(moments), moment) for at, moment in enumerate(moments)]


def _row(program: Program, it: Account, timeline: Timeline) -> list[tuple[float, PeakSnapshot]]:
    """The moments of a pipeline's rank, between its actions and in them, and that of the update."""
    assert it.rank is not None, "report: a pipeline's account has a rank"
    found: list[tuple[float, PeakSnapshot]] = []
    total = timeline.total * 1.02
    pairs = over_row(with_room(program), it.rank)
    ended = 0.0
    for slot, (before, during) in zip(timeline.slots[it.rank], pairs, strict=True):
        if slot.start > ended:
            found.append((ended / total, before))
        found.append((slot.start / total, during))
        ended = slot.end
    last = PeakSnapshot(None, "update", (), "", 0, 0, 0, 0)
    return [*found, (timeline.total / total, it.peak if it.peak.op is None else last)]


def _phases(shown: Sequence[PeakSnapshot], xs: Sequence[float]) -> tuple[tuple[str, float], ...]:
    """Forward, backward, update, each with where it begins."""
    changes = [(b.where, x) for (a, b), x in zip(pairwise(shown), xs[1:], strict=True) if a.where != b.where]
    return ((shown[0].where, 0.0), *changes)


def _scale(program: Program) -> str:
    """The meaning of the horizontal axis."""
    if program.pipeline:
        return "From left to right, the rank's row in time."
    many = program.size(MICROBATCHES)
    of = f"one of {many:,} microbatches" if many > 1 else "the microbatch"
    return f"From left to right, the ops of {of} and the update, equally wide, whatever time they take."
