"""The Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
"""As the format has it: times in µs, `ph` X for what has a duration `dur`."""


def chrome_trace(about: str, origin: str, events: Iterable[Event]) -> str:
    """The text of a file that `origin` has written, an event in each line."""
    lines = ",\n".join(map(json.dumps, events))
    other = json.dumps({"about": about, "origin": origin})
    return f'{{"otherData": {other},\n"displayTimeUnit": "ms",\n"traceEvents": [\n{lines}\n]}}\n'


def process(number: int, name: str, tracks: Iterable[str]) -> Iterator[Event]:
    """A process and its tracks, in their order."""
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    for at, track in enumerate(tracks):
        yield {"ph": "M", "pid": number, "tid": at, "name": "thread_name", "args": {"name": track}}
        yield {
            "ph": "M",
            "pid": number,
            "tid": at,
            "name": "thread_sort_index",
            "args": {"sort_index": at},
        }
