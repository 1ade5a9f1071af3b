"""The clocks of a walk: when each stream is free, what the time was spent on, and, where asked,
what was done when.

Non-goals: when ops begin (`timeline`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from attrs import define, evolve, field, frozen

HOST, UPDATE, BUBBLE = "host", "update", "bubble"
"""The kinds of time: the GPU waits for the host; work that is done once a step; what pipelines
wait.
"""

GPU = "gpu"
"""The stream of what a rank computes; others are `HOST`, and the axes of each group of ranks."""

EPSILON = 1e-12
"""Seconds that equal times may differ by, since they are sums of rounded numbers."""

Stream = str | tuple[str, ...]

Seconds = defaultdict[tuple[str, ...], float]
"""Seconds by kind and line of the plan, or by the axes of a group."""


def nothing() -> Seconds:
    """No seconds yet."""
    return Seconds(float)


def add(to: Seconds, seconds: Mapping[tuple[str, ...], float], times: float = 1) -> None:
    """Adds seconds, `times` times."""
    for key, value in seconds.items():
        to[key] += value * times


@frozen
class StepTime:
    """The seconds of a step, `spent` by kind and plan line; and the seconds that each group's
    links are busy, `sent` by axes.
    """

    seconds: float
    spent: Seconds
    sent: Seconds
    rank: int | None = None
    """The rank along the pipeline's axis, if there is one."""

    @property
    def kinds(self) -> dict[str, float]:
        """The seconds of each kind."""
        seconds_by_kind = dict[str, float]()
        for (kind, _), seconds in self.spent.items():
            seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + seconds
        return seconds_by_kind


@frozen
class Event:
    """The work or the wait of a stream from `begin` to `end`, for a line of the plan.

    `due` is when the value is there that a wait is for, or that a collective sends.  It may be
    before the event begins.
    """

    stream: Stream
    kind: str
    line: str
    begin: float
    end: float
    due: float


@frozen
class Again:
    """`times` more iterations like the last one, of these events; each is later than the one before
    by a stream's `shift`.
    """

    events: tuple["Event | Again", ...]
    times: int
    shift: Mapping[Stream, float]


Events = list[Event | Again]


def _make_stretched_event(event: Event | Again, factor: float) -> Event | Again:
    if isinstance(event, Event):
        begin, end, due = event.begin * factor, event.end * factor, event.due * factor
        return evolve(event, begin=begin, end=end, due=due)
    events = tuple(_make_stretched_event(inner, factor) for inner in event.events)
    shift = {stream: seconds * factor for stream, seconds in event.shift.items()}
    return evolve(event, events=events, shift=shift)


@define
class Clocks:
    """When each stream is free, in seconds from the step's begin, and how long each was busy with
    what.

    groups  by the axes of a group of ranks, when its collectives are done
    spent   the GPU's time, by kind and line
    sent    the time of groups, by axes
    events  what each stream has done, in the order that the program begins it in; None where
            nobody asks
    """

    gpu: float = 0.0
    host: float = 0.0
    groups: Seconds = field(factory=nothing)
    spent: Seconds = field(factory=nothing)
    sent: Seconds = field(factory=nothing)
    events: Events | None = None

    def until(self, time: float, kind: str, line: str) -> None:
        """Moves the GPU on to a time: it is busy, or waits."""
        if self.events is not None:
            self.events.append(Event(GPU, kind, line, self.gpu, max(self.gpu, time), time))
        if time > self.gpu:
            self.spent[kind, line] += time - self.gpu
            self.gpu = time

    def issue(self, seconds: float, line: str) -> None:
        """Moves the host on: it issues something."""
        if self.events is not None:
            self.events.append(Event(HOST, HOST, line, self.host, self.host + seconds, self.host))
        self.host += seconds

    def send(
        self, axes: tuple[str, ...], seconds: float, kind: str, line: str, due: float = 0.0
    ) -> float:
        """Begins a collective of a group once the host has issued it, and the GPU and what is sent
        are there; returns its end.
        """
        begin = max(self.host, self.gpu, self.groups[axes], due)
        end = self.groups[axes] = begin + seconds
        self.sent[axes] += seconds
        if self.events is not None:
            self.events.append(Event(axes, kind, line, begin, end, due))
        return end

    def copy(self) -> "Clocks":
        """The clocks as they are now, without events."""
        return Clocks(
            self.gpu,
            self.host,
            groups=Seconds(float, self.groups),
            spent=Seconds(float, self.spent),
            sent=Seconds(float, self.sent),
        )

    def make_stretched(self, factor: float) -> "Clocks":
        """The clocks of the same work if all of it takes `factor` times as long."""
        longer = Clocks(self.gpu * factor, self.host * factor)
        add(longer.groups, self.groups, factor)
        add(longer.spent, self.spent, factor)
        add(longer.sent, self.sent, factor)
        if self.events is not None:
            longer.events = [_make_stretched_event(event, factor) for event in self.events]
        return longer

    def since(self, before: "Clocks") -> list[float]:
        """How far each stream has come since `before`, the GPU first."""
        groups = (now - before.groups.get(axes, 0.0) for axes, now in self.groups.items())
        return [self.gpu - before.gpu, self.host - before.host, *groups]

    def is_steady(self, took: Sequence[float], earlier: Sequence[float]) -> bool:
        """Whether iterations will go on as the last two, `took` and `earlier`: how far streams came
        in each.

        A stream that is ahead of the GPU must not fall behind it later, nor one that is behind it
        come ahead.
        """
        if len(took) != len(earlier):
            return False
        if any(abs(a - b) > EPSILON for a, b in zip(took, earlier, strict=True)):
            return False
        streams = (self.host, *self.groups.values())
        for progress, stream in zip(took[1:], streams, strict=False):
            keeps_pace = abs(progress - took[0]) < EPSILON or not progress
            if not keeps_pace and (progress > took[0]) != (stream > self.gpu):
                return False
        return True

    def repeat(self, before: "Clocks", times: int, events: int) -> None:
        """Does as if what has happened since `before`, when there were `events` of them, happened
        `times` times more.
        """
        if self.events is not None:
            shift: dict[Stream, float] = {GPU: self.gpu - before.gpu, HOST: self.host - before.host}
            for axes, now in self.groups.items():
                shift[axes] = now - before.groups.get(axes, 0.0)
            self.events.append(Again(tuple(self.events[events:]), times, shift))
        self.gpu += (self.gpu - before.gpu) * times
        self.host += (self.host - before.host) * times
        for now, then in (
            (self.groups, before.groups),
            (self.spent, before.spent),
            (self.sent, before.sent),
        ):
            add(now, {key: now[key] - then[key] for key in now}, times)
