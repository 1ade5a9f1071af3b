"""Memory of a rank over a step by owner, in the numbers of `scalec explain memory`.

It is drawn as areas by owner, the peak marked; what comes and goes has a scale of its own if it is
small.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from attrs import frozen

from ...compiler.analysis.expert_loads import with_room
from ...compiler.analysis.memory import (
    VERDICTS,
    Account,
    PeakSnapshot,
    account,
    capacity,
    need_range,
    place,
)
from ...compiler.analysis.memory.account import over_microbatch
from ...compiler.analysis.memory.pipeline_peak import over_row
from ...compiler.analysis.time.op_rows import op_seconds
from ...compiler.config.units import amount
from ...compiler.ir import MICROBATCHES, Program
from ...compiler.reports.explain import moment
from ...compiler.reports.time import seconds
from ...compiler.schedules.actions import Work
from ...compiler.schedules.timeline import Slot
from ..drawing import Canvas, columns, text_width, ticks
from .pipeline import Pipeline
from .subject import Subject

COLUMNS = 480
"""How many moments are drawn at most: of several that share a column, the one with most in memory
is drawn.
"""


@frozen
class Owner:
    """Bytes of one owner in each moment, and the number of the series that it is drawn as."""

    name: str
    series: int
    bytes: tuple[int, ...]


@frozen
class Memory:
    """Owners from the bottom to the top, in moments that begin at `xs`, from 0 to 1.

    scale     the meaning of the horizontal axis, a sentence
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


def memory(subject: Subject, pipeline: Pipeline | None) -> Memory:
    """The memory of the rank that needs most; `pipeline` is the plan's pipeline."""
    program, memory = subject.program, account(subject.program)
    timed = _microbatch(subject) if pipeline is None else _row(program, memory, pipeline)
    points = [(x, snapshot.bytes) for x, snapshot in timed.moments]
    xs, snapshots = list[float](), list[PeakSnapshot]()
    for index in columns(points, COLUMNS):
        x, snapshot = timed.moments[index]
        xs.append(x)
        snapshots.append(snapshot)
    peak = max(range(len(snapshots)), key=lambda index: snapshots[index].bytes)
    return Memory(
        whose=place(program, memory),
        verdict=_verdict(program, memory),
        scale=_scale(program, timed.seconds),
        seconds=timed.seconds,
        owners=(*_always(memory, len(snapshots)), *_passing(snapshots)),
        xs=tuple(xs),
        phases=timed.phases,
        peak=peak,
        peak_words=moment(memory.peak),
        needs=memory.needs,
        capacity=capacity(program),
    )


@frozen
class _Moments:
    """Moments with where they begin, from 0 to 1; the seconds from 0 to 1, None where they are
    not known.
    """

    moments: list[tuple[float, PeakSnapshot]]
    seconds: float | None
    phases: tuple[tuple[str, float], ...]


def _verdict(program: Program, memory: Account) -> str:
    """For instance `fits: 57.0 GiB of 80.0 GiB`."""
    room = capacity(program)
    if room is None:
        return f"needs {amount(memory.needs)}"
    verdict = VERDICTS[need_range(program, memory).fits(room)]
    return f"{verdict}: {amount(memory.needs)} of {amount(room)}"


def _always(memory: Account, moments: int) -> list[Owner]:
    """Owners of what is there for the whole step."""
    parameters = sum(bucket.parameters for bucket in memory.buckets)
    masters = sum(bucket.masters for bucket in memory.buckets)
    gradients = sum(bucket.gradients for bucket in memory.buckets)
    sizes = (
        ("reserve", 7, memory.reserve),
        ("parameters", 0, parameters),
        ("masters", 6, masters),
        ("gradients", 2, gradients),
        ("optimizer", 3, memory.state - parameters - masters - gradients),
        ("inputs, tables", 7, memory.inputs + memory.tables),
    )
    return [Owner(name, series, (size,) * moments) for name, series, size in sizes if size]


_PASSING: tuple[tuple[str, int, Callable[[PeakSnapshot], int]], ...] = (
    ("unsharded weights", 4, lambda snapshot: snapshot.weights),
    ("unsharded gradients", 5, lambda snapshot: snapshot.gradients),
    ("saved activations", 1, lambda snapshot: snapshot.kept),
    ("temporaries", 5, lambda snapshot: snapshot.other),
)
"""Owners of what comes and goes, and their series."""


def _passing(shown: Sequence[PeakSnapshot]) -> list[Owner]:
    """The owners of what comes and goes that have any bytes."""
    owners: list[Owner] = []
    for name, series, size in _PASSING:
        sizes = tuple(map(size, shown))
        if any(sizes):
            owners.append(Owner(name, series, sizes))
    return owners


def _microbatch(subject: Subject) -> _Moments:
    """The moments of a microbatch and of the update, as wide as the time they take, or all
    alike.
    """
    snapshots = over_microbatch(subject.program)
    widths, seconds = [1.0] * len(snapshots), None
    if on := subject.hardware:
        times = op_seconds(subject.program, on)
        seconds = times.microbatch + times.once
        # the last moment is the update's
        widths = [_seconds_of(snapshot, times.ops) for snapshot in snapshots[:-1]]
        total = sum(widths) or 1.0
        widths = [*(width * times.microbatch / total for width in widths), times.once]
    begins = [0.0, *accumulate(widths)]
    moments, phases = list[tuple[float, PeakSnapshot]](), list[tuple[str, float]]()
    for begin, snapshot in zip(begins, snapshots, strict=False):
        x = begin / begins[-1]
        if not moments:
            phases.append((snapshot.where, 0.0))
        elif snapshot.where != moments[-1][1].where:
            phases.append((snapshot.where, x))
        moments.append((x, snapshot))
    return _Moments(moments, seconds, tuple(phases))


def _seconds_of(snapshot: PeakSnapshot, seconds_by_value: Mapping[str, float]) -> float:
    """The seconds of the op of a moment; 0 where it has none, or no results."""
    if not snapshot.op or not snapshot.op.outputs:
        return 0.0
    return seconds_by_value.get(snapshot.op.outputs[0].name, 0.0)


UPDATE = 0.02
"""The part of a pipeline's row that the update has where its time is not known."""


def _row(program: Program, memory: Account, pipeline: Pipeline) -> _Moments:
    """The moments of a pipeline's rank, between its actions and in them, and the update's."""
    assert memory.rank is not None, "report: a pipeline's account has a rank"
    timeline = pipeline.picture.timeline
    total = pipeline.seconds or timeline.total * (1 + UPDATE)
    moments: list[tuple[float, PeakSnapshot]] = []
    slots, last_end = timeline.slots[memory.rank], 0.0
    snapshots = over_row(with_room(program), memory.rank)
    for slot, (before, during) in zip(slots, snapshots, strict=True):
        if slot.start > last_end:
            moments.append((last_end / total, before))
        moments.append((slot.start / total, during))
        last_end = slot.end
    # a peak without an op is the update's
    update = PeakSnapshot(None, "update", (), "", 0, 0, 0, 0)
    if memory.peak.op is None:
        update = memory.peak
    moments.append((last_end / total, update))
    phases = tuple((name, x / total) for name, x in _phases(slots))
    return _Moments(moments, pipeline.seconds, phases)


def _phases(slots: Sequence[Slot]) -> list[tuple[str, float]]:
    """The parts of a rank's row that take any time, each with when it begins, and the update."""
    first_backward = next(
        (slot.start for slot in slots if slot.action.work is not Work.FORWARD), 0.0
    )
    forward_ends = [slot.end for slot in slots if slot.action.work is Work.FORWARD]
    last_forward, end_of_row = max(forward_ends, default=0.0), slots[-1].end
    if last_forward <= first_backward:
        parts = [("forward", 0.0), ("backward", first_backward)]
    else:
        parts = [("warm-up", 0.0), ("steady", first_backward), ("cool-down", last_forward)]
    phases: list[tuple[str, float]] = []
    for (name, x), (_, end) in pairwise([*parts, ("update", end_of_row)]):
        if end > x:
            phases.append((name, x))
    return [*phases, ("update", end_of_row)]


def _scale(program: Program, seconds: float | None) -> str:
    """The meaning of the horizontal axis."""
    if program.pipeline:
        return "From left to right, the rank's row in time."
    microbatches = program.size(MICROBATCHES)
    part = "the microbatch"
    if microbatches > 1:
        part = f"one of {microbatches:,} microbatches"
    unit = "in time" if seconds else "all ops equally wide"
    return f"From left to right, {part} and the update, {unit}."


WIDTH, LEFT, RIGHT = 1080, 76, 236
UNITS = 1024**3, 1024**2, 1024, 1
SMALL = 0.5
"""The part of all memory under which what comes and goes is drawn apart too."""


def drawing(memory: Memory) -> str:
    """The picture."""
    canvas = Canvas(WIDTH)
    highest = memory.needs
    if memory.capacity and memory.capacity < 1.6 * memory.needs:
        highest = max(memory.needs, memory.capacity)
    whole = _Panel(canvas, memory, memory.owners, 34, 230, highest * 1.04)
    whole.areas()
    whole.peak(f"peak: {amount(memory.needs)}, {memory.peak_words}")
    whole.capacity()
    bytes_of_passing = [owner.bytes for owner in memory.passing]
    most = max(map(sum, zip(*bytes_of_passing, strict=True)), default=0)
    if 0 < most < SMALL * memory.needs:
        canvas.words(LEFT, 332, "what comes and goes, apart", "muted")
        apart = _Panel(canvas, memory, memory.passing, 344, 140, most * 1.08)
        apart.areas()
        apart.peak("")
    return canvas.svg("memory of a rank over a step, by owner")


@frozen
class _Panel:
    """Areas of some owners, from `top` on, `high` pixels for `most` bytes."""

    canvas: Canvas
    memory: Memory
    owners: Sequence[Owner]
    top: float
    high: float
    most: float

    def areas(self) -> None:
        """The scale, the areas, their names, the parts of the step."""
        self._scale()
        edges = [[0.0] * len(self.memory.xs)]
        for owner in self.owners:
            edges.append([below + size for below, size in zip(edges[-1], owner.bytes, strict=True)])
        xs = [*map(_x, (*self.memory.xs, 1.0))]
        for owner, low, high in zip(self.owners, edges, edges[1:], strict=False):
            note = f"{owner.name}: at most {amount(max(owner.bytes))}"
            foot, head = [*map(self._y, low)], [*map(self._y, high)]
            self.canvas.stairs(xs, foot, head, f"s{owner.series} area", note)
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
        peak, y = self.memory.peak, self.top + self.high + 10.0
        for owner, low, high in zip(self.owners, edges, edges[1:], strict=False):
            y = min(self._y((low[peak] + high[peak]) / 2) + 4, y - 14)
            self.canvas.box(WIDTH - RIGHT + 10, y - 9, 9, 9, f"s{owner.series}")
            self.canvas.words(WIDTH - RIGHT + 24, y, f"{owner.name} {amount(owner.bytes[peak])}")

    def _phases(self) -> None:
        """The names of the parts of the step, below the seconds where these are known."""
        foot = self.top + self.high
        baseline = foot + (30 if self.memory.seconds else 16)
        ends = [*(start for _, start in self.memory.phases[1:]), 1.0]
        for (name, start), end in zip(self.memory.phases, ends, strict=False):
            x = _x(start)
            self.canvas.line(x, self.top, x, foot + 6, "edge")
            if text_width(name) + 8 < _x(end) - x or end == 1.0:
                self.canvas.words(x + 4, baseline, name, "muted")
        self._times()

    def _times(self) -> None:
        """Round seconds below the areas."""
        total, foot = self.memory.seconds or 0.0, self.top + self.high
        for tick in ticks(total, most=10):
            x = _x(tick / total)
            self.canvas.line(x, foot, x, foot + 4, "edge")
            self.canvas.words(x, foot + 16, seconds(tick), "mid muted")

    def capacity(self) -> None:
        """A line at what the GPU has."""
        capacity = self.memory.capacity
        if capacity and capacity <= self.most:
            y = self._y(capacity)
            self.canvas.line(LEFT, y, WIDTH - RIGHT, y, "cap")
            words = f"the GPU has {amount(capacity)}"
            self.canvas.box(LEFT + 8, y - 8, text_width(words) + 8, 16, "page")
            self.canvas.words(LEFT + 12, y + 4, words, "alarm")

    def peak(self, words: str) -> None:
        """A mark at the peak, its words to the right, or to the left where there is no room."""
        peak = self.memory.peak
        x = _x(self.memory.xs[peak])
        self.canvas.line(x, self.top - 8, x, self.top + self.high, "mark")
        height = self._y(sum(owner.bytes[peak] for owner in self.owners))
        self.canvas.dot(x, height, 3.5, "ink")
        if x + 8 + text_width(words) < WIDTH:
            self.canvas.words(x + 8, self.top - 12, words, "head")
        else:
            self.canvas.words(x - 8, self.top - 12, words, "head end")


def _x(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - RIGHT)
