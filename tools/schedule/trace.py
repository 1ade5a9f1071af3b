"""A schedule as a trace that Perfetto and chrome://tracing show: a track for each rank, an
arrow for each message.
"""

from collections.abc import Iterator
from itertools import count

from ...compiler.reports.chrome_trace import Event, chrome_trace, process
from ...compiler.schedules.dependencies import Value, get_inputs, get_result
from ...compiler.schedules.timeline import Slot
from .picture import MARK, WORDS, Picture

_UNIT = 1000
"""Microseconds, in which the format counts."""


def trace(picture: Picture) -> str:
    """The text of the file."""
    tracks = process(0, picture.title, [f"rank {rank}" for rank in range(picture.schedule.ranks)])
    events = (*tracks, *_actions(picture), *_messages(picture))
    return chrome_trace(f"{picture.title}; {picture.subtitle}", MARK, events)


def _actions(picture: Picture) -> Iterator[Event]:
    for rank, row in enumerate(picture.timeline.slots):
        for slot in row:
            action = slot.action
            yield {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": _time(slot.start),
                "dur": round(_time(slot.end) - _time(slot.start), 3),
                "name": str(action),
                "cat": WORDS[action.work],
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }


def _messages(picture: Picture) -> Iterator[Event]:
    """Arrows from the action that makes a value to the beginning of the action that waits for
    it, wherever the two are on different ranks.
    """
    stage_to_rank, numbers = picture.schedule.stage_to_rank, count()
    makers: dict[Value, Slot] = {}
    for slot in picture.slots:
        if value := get_result(slot.action):
            makers[value] = slot
    for slot in picture.slots:
        for value in get_inputs(slot.action, len(stage_to_rank)):
            if stage_to_rank[value.stage] != stage_to_rank[slot.action.stage]:
                name = "gradient" if value.gradient else "activation"
                arrow: Event = {"pid": 0, "cat": "message", "name": name, "id": next(numbers)}
                yield {"ph": "s", **arrow, **_end(makers[value], stage_to_rank)}
                yield {"ph": "f", "bp": "e", **arrow, **_end(slot, stage_to_rank)}


def _end(slot: Slot, stage_to_rank: tuple[int, ...]) -> Event:
    return {"tid": stage_to_rank[slot.action.stage], "ts": _time(slot.start)}


def _time(value: float) -> float:
    """A time in µs, to the nanosecond."""
    return round(value * _UNIT, 3)
