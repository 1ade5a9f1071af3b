"""The clocks of a walk: by when each stream is free, what the time was spent on, and, where asked,
what was done when.

Non-goals: when ops begin (`timeline`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from attrs import define, evolve, field, frozen

HOST, UPDATE, BUBBLE = "host", "update", "bubble"
"""The kinds of time in which the GPU waits for the host, of what is done once a step, and of
what pipelines wait.
"""

GPU = "gpu"
"""The stream of what a rank computes; others are `HOST`, and the axes of each group of ranks."""

EPSILON = 1e-12
"""Seconds by which equal times differ as they are added up."""

Stream = str | tuple[str, ...]

Seconds = defaultdict[tuple[str, ...], float]
"""Seconds by kind and line of the plan, or by the axes of a group."""


def nothing() -> Seconds:
    """No seconds yet."""
    return Seconds(float)


def add(to: Seconds, seconds: Mapping[tuple[str, ...], float], times: float = 1) -> None:
    """Adds seconds, `times` times."""
    for key, each in seconds.items():
        to[key] += each * times


@frozen
class StepTime:
    """The seconds of a step, `spent` by kind and plan line; and those in which each group's
    links are busy, by axes.
    """

    seconds: float
    spent: Seconds
    sent: Seconds
    rank: int | None = None
    """That along the pipeline's axis, if there is one."""

    @property
    def kinds(self) -> dict[str, float]:
        """The seconds of each kind."""
        found = dict[str, float]()
        for (kind, _), seconds in self.spent.items():
            found[kind] = found.get(kind, 0.0) + seconds
        return found


@frozen
class Event:
    """The work or the wait of a stream from `begin` to `end`, for a line of the plan.

    `due` is when what a wait is for, or what a collective sends, is there, which may be before it
    begins.
    """

    stream: Stream
    kind: str
    line: str
    begin: float
    end: float
    due: float


@frozen
class Again:
    """`times` more iterations like the last one, of these events; each a stream's `shift` later
    than the one before.
    """

    events: tuple["Event | Again", ...]
    times: int
    shift: Mapping[Stream, float]


Events = list[Event | Again]


def _stretched(event: Event | Again, factor: float) -> Event | Again:
    if isinstance(event, Event):
        return evolve(
            event, begin=event.begin * factor, end=event.end * factor, due=event.due * factor
        )
    events = tuple(_stretched(inner, factor) for inner in event.events)
    shift = {stream: seconds * factor for stream, seconds in event.shift.items()}
    return evolve(event, events=events, shift=shift)


@define
class Clocks:
    """By when each stream is free, in seconds from the step's begin, and for how long each was busy
    with what.

    groups  by the axes of a group of ranks, its collectives
    spent   the GPU's time, by kind and line
    sent    that of groups, by axes
    events  what each stream has done, in the order in which the program begins it; None where
            nobody asks
    """

    gpu: float = 0.0
    host: float = 0.0
    groups: Seconds = field(factory=nothing)
    spent: Seconds = field(factory=nothing)
    sent: Seconds = field(factory=nothing)
    events: Events | None = None

    def until(self, time: float, kind: str, line: str) -> None:
        """The GPU is busy, or waits."""
        if self.events is not None:
            self.events.append(Event(GPU, kind, line, self.gpu, max(self.gpu, time), time))
        if time > self.gpu:
            self.spent[kind, line] += time - self.gpu
            self.gpu = time

    def issue(self, seconds: float, line: str) -> None:
        """The host is busy."""
        if self.events is not None:
            self.events.append(Event(HOST, HOST, line, self.host, self.host + seconds, self.host))
        self.host += seconds

    def send(
        self, axes: tuple[str, ...], seconds: float, kind: str, line: str, due: float = 0.0
    ) -> float:
        """A group begins a collective once the host has issued it, and the GPU and what is sent
        are there; its end.
        """
        begin = max(self.host, self.gpu, self.groups[axes], due)
        end = self.groups[axes] = begin + seconds
        self.sent[axes] += seconds
        if self.events is not None:
            self.events.append(Event(axes, kind, line, begin, end, due))
        return end

    def copy(self) -> "Clocks":
        """As they are now."""
        groups, spent, sent = (Seconds(float, it) for it in (self.groups, self.spent, self.sent))
        return Clocks(self.gpu, self.host, groups, spent, sent)

    def stretched(self, factor: float) -> "Clocks":
        """The clocks of the same work if all of it takes `factor` times as long."""
        groups, spent, sent = nothing(), nothing(), nothing()
        for longer, seconds in ((groups, self.groups), (spent, self.spent), (sent, self.sent)):
            add(longer, seconds, factor)
        events = (
            None if self.events is None else [_stretched(event, factor) for event in self.events]
        )
        return Clocks(self.gpu * factor, self.host * factor, groups, spent, sent, events)

    def since(self, before: "Clocks") -> list[float]:
        """How far each stream has come since `before`, the GPU first."""
        groups = (now - before.groups.get(axes, 0.0) for axes, now in self.groups.items())
        return [self.gpu - before.gpu, self.host - before.host, *groups]

    def is_steady(self, took: Sequence[float], earlier: Sequence[float]) -> bool:
        """Whether iterations will go on as the last two, in which streams came this far.

        A stream that is ahead of the GPU must not fall behind it later, nor one that is behind it
        come ahead.
        """
        if len(took) != len(earlier) or any(
            abs(a - b) > EPSILON for a, b in zip(took, earlier, strict=True)
        ):
            return False
        return all(
            abs(each - took[0]) < EPSILON or not each or (each > took[0]) == (stream > self.gpu)
            for each, stream in zip(took[1:], (self.host, *self.groups.values()), strict=False)
        )

    def repeat(self, before: "Clocks", times: int, events: int) -> None:
        """As if what has happened since `before`, when there were `events` of them, happened
        `times` times more.
        """
        if self.events is not None:
            shift: dict[Stream, float] = {GPU: self.gpu - before.gpu, HOST: self.host - before.host}
            shift |= {axes: now - before.groups.get(axes, 0.0) for axes, now in self.groups.items()}
            self.events.append(Again(tuple(self.events[events:]), times, shift))
        self.gpu += (self.gpu - before.gpu) * times
        self.host += (self.host - before.host) * times
        for now, then in (
            (self.groups, before.groups),
            (self.spent, before.spent),
            (self.sent, before.sent),
        ):
            add(now, {key: now[key] - then[key] for key in now}, times)
