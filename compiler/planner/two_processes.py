"""Work on items in two processes, where there are two cores: this one, and a copy that takes every second item."""

import os
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WORTH = 4
"""Items from which on a second process pays."""


def in_two(work: Callable[[Item], Result], items: Sequence[Item], *, worth: int = WORTH) -> list[Result]:
    """The results, in the order of items.  What `work` raises in either process is raised here."""
    if len(items) < worth or _cores() < 2:
        return [work(item) for item in items]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _copy(work, items[1::2], read, write)
    os.close(write)
    try:
        first = [work(item) for item in items[::2]]
    finally:
        with os.fdopen(read, "rb") as file:
            said = file.read()
        os.waitpid(child, 0)
    second: list[Result] | BaseException = pickle.loads(said)
    if isinstance(second, BaseException):
        raise second
    results = {0: iter(first), 1: iter(second)}
    return [next(results[at % 2]) for at in range(len(items))]


def _copy(work: Callable[[Item], Result], items: Sequence[Item], read: int, write: int) -> None:
    """Does the items, says what came of them, and ends without what this process does at its end."""
    try:
        os.close(read)
        try:
            found: object = [work(item) for item in items]
        except BaseException as error:
            found = error
        with os.fdopen(write, "wb") as file:
            file.write(_pickled(found))
    finally:
        os._exit(0)


def _pickled(found: object) -> bytes:
    try:
        return pickle.dumps(found)
    except Exception as error:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
