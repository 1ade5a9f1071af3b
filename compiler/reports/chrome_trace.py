"""The Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
"""An event in the keys of the format: times are in µs, and `ph` is X where the event has a
duration `dur`.
"""


def chrome_trace(about: str, origin: str, events: Iterable[Event]) -> str:
    """The text of a trace file with an event in each line; `origin` names its writer."""
    lines = ",\n".join(map(json.dumps, events))
    other = json.dumps({"about": about, "origin": origin})
    return f'{{"otherData": {other},\n"displayTimeUnit": "ms",\n"traceEvents": [\n{lines}\n]}}\n'


def process(number: int, name: str, tracks: Iterable[str]) -> Iterator[Event]:
    """The events that name a process and its tracks, and that keep the tracks in this order."""
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    for position, track in enumerate(tracks):
        thread = {"ph": "M", "pid": number, "tid": position}
        yield {**thread, "name": "thread_name", "args": {"name": track}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": position}}
