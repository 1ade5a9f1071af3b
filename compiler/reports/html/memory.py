"""Memory of a rank over a step by owner, in the numbers of `scalec explain memory`.

It is drawn as areas by owner, the peak marked; what comes and goes has a scale of its own if it is
small.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from attrs import frozen

from ...analysis.expert_loads import with_room
from ...analysis.memory import VERDICTS, Account, PeakSnapshot, account, capacity, need_range, place
from ...analysis.memory.account import over_microbatch
from ...analysis.memory.pipeline_peak import over_row
from ...analysis.time.op_rows import op_seconds
from ...config.units import amount
from ...ir import MICROBATCHES, Program
from ...schedules.actions import Work
from ...schedules.timeline import Slot
from ..drawing import Canvas, columns, ticks, wide
from ..explain import moment
from ..time import seconds
from .pipeline import Pipeline
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
    seconds   that the horizontal axis takes; None where they are not known
    phases    parts of the step, each with where it begins
    peak      which moment is the peak, and its name
    needs     bytes at the peak, reserve included
    """

    whose: str
    verdict: str
    scale: str
    seconds: float | None
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


def memory(of: Subject, pipeline: Pipeline | None) -> Memory:
    """The memory of the rank that needs most; `pipeline` is that of the plan."""
    program, it = of.program, account(of.program)
    found = _microbatch(of) if pipeline is None else _row(program, it, pipeline)
    kept = [
        found.moments[at] for at in columns([(x, each.bytes) for x, each in found.moments], COLUMNS)
    ]
    shown, places = [each for _, each in kept], [x for x, _ in kept]
    peak = max(range(len(shown)), key=lambda at: shown[at].bytes)
    return Memory(
        place(program, it),
        _verdict(program, it),
        _scale(program, found.seconds),
        found.seconds,
        (*_always(it, len(shown)), *_passing(shown)),
        tuple(places),
        found.phases,
        peak,
        moment(it.peak),
        it.needs,
        capacity(program),
    )


@frozen
class _Moments:
    """Moments with where they begin, from 0 to 1; the seconds from 0 to 1, None where they are
    not known.
    """

    moments: list[tuple[float, PeakSnapshot]]
    seconds: float | None
    phases: tuple[tuple[str, float], ...]


def _verdict(program: Program, it: Account) -> str:
    """For instance `fits: 57.0 GiB of 80.0 GiB`."""
    room = capacity(program)
    if room is None:
        return f"needs {amount(it.needs)}"
    verdict = VERDICTS[need_range(program, it).fits(room)]
    return f"{verdict}: {amount(it.needs)} of {amount(room)}"


def _always(it: Account, moments: int) -> list[Owner]:
    """Owners of what is there for the whole step."""
    parts = [(b.parameters, b.masters, b.gradients) for b in it.buckets]
    parameters, masters, gradients = (
        (sum(each) for each in zip(*parts, strict=True)) if parts else (0, 0, 0)
    )
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


def _microbatch(of: Subject) -> _Moments:
    """The moments of a microbatch and of the update, as wide as the time they take, or all
    alike.
    """
    moments = over_microbatch(of.program)
    widths, seconds = [1.0] * len(moments), None
    if on := of.hardware:
        took = op_seconds(of.program, on)
        seconds = took.microbatch + took.once
        own = [
            took.ops.get(it.op.outputs[0].name, 0.0) if it.op and it.op.outputs else 0.0
            for it in moments[:-1]
        ]
        widths = [*(each * took.microbatch / (sum(own) or 1.0) for each in own), took.once]
    begins = [0.0, *accumulate(widths)]
    found = [(begin / begins[-1], moment) for begin, moment in zip(begins, moments, strict=False)]
    changes = [(b.where, x) for (_, a), (x, b) in pairwise(found) if a.where != b.where]
    return _Moments(found, seconds, ((moments[0].where, 0.0), *changes))


UPDATE = 0.02
"""The part of a pipeline's row that the update has where its time is not known."""


def _row(program: Program, it: Account, pipeline: Pipeline) -> _Moments:
    """The moments of a pipeline's rank, between its actions and in them, and that of the update."""
    assert it.rank is not None, "report: a pipeline's account has a rank"
    timeline = pipeline.picture.timeline
    total = pipeline.seconds or timeline.total * (1 + UPDATE)
    found: list[tuple[float, PeakSnapshot]] = []
    slots, ended = timeline.slots[it.rank], 0.0
    for slot, (before, during) in zip(slots, over_row(with_room(program), it.rank), strict=True):
        if slot.start > ended:
            found.append((ended / total, before))
        found.append((slot.start / total, during))
        ended = slot.end
    last = PeakSnapshot(None, "update", (), "", 0, 0, 0, 0)
    found.append((ended / total, it.peak if it.peak.op is None else last))
    return _Moments(found, pipeline.seconds, tuple((name, x / total) for name, x in _phases(slots)))


def _phases(slots: Sequence[Slot]) -> list[tuple[str, float]]:
    """The parts of a rank's row, each with when it begins, and the update."""
    back = next((slot.start for slot in slots if slot.action.work is not Work.FORWARD), 0.0)
    ahead = max((slot.end for slot in slots if slot.action.work is Work.FORWARD), default=0.0)
    parts = [("warm-up", 0.0), ("steady", back), ("cool-down", ahead), ("update", slots[-1].end)]
    if ahead <= back:
        parts = [("forward", 0.0), ("backward", back), ("update", slots[-1].end)]
    return [
        (name, x)
        for (name, x), (_, end) in zip(parts, [*parts[1:], ("", float("inf"))], strict=True)
        if end > x
    ]


def _scale(program: Program, seconds: float | None) -> str:
    """The meaning of the horizontal axis."""
    if program.pipeline:
        return "From left to right, the rank's row in time."
    many = program.size(MICROBATCHES)
    of = f"one of {many:,} microbatches" if many > 1 else "the microbatch"
    return (
        f"From left to right, {of} and the update,"
        f" {'in time' if seconds else 'all ops equally wide'}."
    )


WIDTH, LEFT, RIGHT = 1080, 76, 236
UNITS = 1024**3, 1024**2, 1024, 1
SMALL = 0.5
"""The part of all memory under which what comes and goes is drawn apart too."""


def drawing(it: Memory) -> str:
    """The picture."""
    canvas = Canvas(WIDTH)
    capacity = it.capacity if it.capacity and it.capacity < 1.6 * it.needs else 0
    whole = _Panel(canvas, it, it.owners, 34, 230, max(it.needs, capacity) * 1.04)
    whole.areas()
    whole.peak(f"peak: {amount(it.needs)}, {it.peak_words}")
    whole.capacity()
    most = max(
        (sum(sizes) for sizes in zip(*(owner.bytes for owner in it.passing), strict=True)),
        default=0,
    )
    if 0 < most < SMALL * it.needs:
        canvas.words(LEFT, 332, "what comes and goes, apart", "muted")
        apart = _Panel(canvas, it, it.passing, 344, 140, most * 1.08)
        apart.areas()
        apart.peak("")
    return canvas.svg("memory of a rank over a step, by owner")


@frozen
class _Panel:
    """Areas of some owners, from `top` on, `high` pixels for `most` bytes."""

    canvas: Canvas
    it: Memory
    owners: Sequence[Owner]
    top: float
    high: float
    most: float

    def areas(self) -> None:
        """The scale, the areas, their names, the parts of the step."""
        self._scale()
        edges = [[0.0] * len(self.it.xs)]
        for owner in self.owners:
            edges.append([below + size for below, size in zip(edges[-1], owner.bytes, strict=True)])
        for owner, low, high in zip(self.owners, edges, edges[1:], strict=False):
            note = f"{owner.name}: at most {amount(max(owner.bytes))}"
            foot, head = ([self._y(size) for size in edge] for edge in (low, high))
            self.canvas.stairs(
                [_x(x) for x in (*self.it.xs, 1.0)], foot, head, f"s{owner.series} area", note
            )
        self._names(edges)
        self._phases()

    def _y(self, size: float) -> float:
        return self.top + self.high * (1 - size / self.most)

    def _scale(self) -> None:
        unit = next(unit for unit in UNITS if self.most >= 2 * unit or unit == 1)
        for tick in ticks(self.most / unit, most=max(int(self.high / 40), 2)):
            y = self._y(tick * unit)
            self.canvas.line(LEFT, y, WIDTH - RIGHT, y)
            self.canvas.words(
                LEFT - 8, y + 4, amount(round(tick * unit)).replace(".0", ""), "end muted"
            )

    def _names(self, edges: list[list[float]]) -> None:
        """Names at the right, each near its band at the peak, none over another."""
        at, y = self.it.peak, self.top + self.high + 10.0
        for owner, low, high in zip(self.owners, edges, edges[1:], strict=False):
            y = min(self._y((low[at] + high[at]) / 2) + 4, y - 14)
            self.canvas.box(WIDTH - RIGHT + 10, y - 9, 9, 9, f"s{owner.series}")
            self.canvas.words(WIDTH - RIGHT + 24, y, f"{owner.name} {amount(owner.bytes[at])}")

    def _phases(self) -> None:
        ends = [*(start for _, start in self.it.phases[1:]), 1.0]
        for (name, start), end in zip(self.it.phases, ends, strict=False):
            x = _x(start)
            self.canvas.line(x, self.top, x, self.top + self.high + 6, "edge")
            if wide(name) + 8 < _x(end) - x or end == 1.0:
                self.canvas.words(
                    x + 4, self.top + self.high + (30 if self.it.seconds else 16), name, "muted"
                )
        self._times()

    def _times(self) -> None:
        """Round seconds below the areas."""
        total, foot = self.it.seconds or 0.0, self.top + self.high
        for tick in ticks(total, most=10):
            x = _x(tick / total)
            self.canvas.line(x, foot, x, foot + 4, "edge")
            self.canvas.words(x, foot + 16, seconds(tick), "mid muted")

    def capacity(self) -> None:
        """A line at what the GPU has."""
        if self.it.capacity and self.it.capacity <= self.most:
            y = self._y(self.it.capacity)
            self.canvas.line(LEFT, y, WIDTH - RIGHT, y, "cap")
            said = f"the GPU has {amount(self.it.capacity)}"
            self.canvas.box(LEFT + 8, y - 8, wide(said) + 8, 16, "page")
            self.canvas.words(LEFT + 12, y + 4, said, "alarm")

    def peak(self, said: str) -> None:
        """A mark at the peak, its words to the side where there is room."""
        x, at = _x(self.it.xs[self.it.peak]), self.it.peak
        self.canvas.line(x, self.top - 8, x, self.top + self.high, "mark")
        self.canvas.dot(x, self._y(sum(owner.bytes[at] for owner in self.owners)), 3.5, "ink")
        room = x + 8 + wide(said) < WIDTH
        self.canvas.words(
            x + (8 if room else -8), self.top - 12, said, "head" if room else "head end"
        )


def _x(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - RIGHT)
