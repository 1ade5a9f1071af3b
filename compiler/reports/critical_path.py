"""The report of `scalec explain time --critical`: what makes a step as long as it is, and what has time to spare."""

from collections.abc import Iterator

from ..analysis.time.critical_path import CriticalPath
from .summary import table
from .time import LEAST, seconds

ABOUT = "slack: by how much longer an op of that line may take before the step does; the least of all its ops"


def critical(it: CriticalPath) -> str:
    """A table by kind and plan line: first those on the path, the longest first, then others, the least slack first."""
    rows = [("critical path", "seconds", "share", "slack", ""), *_rows(it)]
    return "\n".join((*table(rows, "lrrrl"), "", ABOUT))


def _rows(it: CriticalPath) -> Iterator[tuple[str, str, str, str, str]]:
    keys = sorted(it.slack, key=lambda key: (-it.on_path.get(key, 0.0), it.slack[key]))
    for kind, line in keys:
        on_path, slack = it.on_path.get((kind, line), 0.0), it.slack[kind, line]
        if on_path >= LEAST * it.seconds:
            yield kind, seconds(on_path), f"{on_path / it.seconds:.0%}", seconds(slack), line
        elif slack >= LEAST * it.seconds:
            yield kind, "", "", seconds(slack), line
