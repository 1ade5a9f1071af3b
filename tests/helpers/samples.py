"""`@pytest.mark.sample(n)`: `make test` runs n cases of a test, `make test-long` the others."""

from collections.abc import Iterator
from itertools import groupby
from typing import cast
from zlib import crc32

import pytest


def outside_of_samples(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of sampled tests that are not in the sample."""
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        several = [item for item in cases if not item.get_closest_marker("long")]
        marker = several[0].get_closest_marker("sample") if several else None
        if marker is not None:
            chosen = {item.nodeid for item in sample(several, cast(int, marker.args[0]))}
            yield from (item for item in several if item.nodeid not in chosen)


def sample(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many cases, the same at each run: each adds the most values of parameters that no
    earlier one has.
    """
    left = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
    chosen: list[pytest.Item] = []
    seen: set[tuple[str, str]] = set()
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda item: len(_values(item) - seen))
        left.remove(best)
        chosen.append(best)
        seen |= _values(best)
    return chosen


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """The parameters of a case, each with its value: their `indices` are those of the case,
    which are all different.
    """
    return {
        (name, repr(value)) for name, value in cast(pytest.Function, item).callspec.params.items()
    }
