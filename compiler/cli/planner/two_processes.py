"""Work on items in two processes, where there are two cores: this one and a copy, each of which
takes the next item.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WORTH = 4
"""Items from which on a second process pays."""

NUMBER = 2
"""Bytes of an item's number; a pipe holds those of 32,768."""


def in_two(
    work: Callable[[Item], Result], items: Sequence[Item], *, worth: int = WORTH
) -> list[Result]:
    """The results, in the order of items.

    An exception of `work` in either process is raised here.
    """
    if len(items) < worth or _cores() < 2:
        return [work(item) for item in items]
    queue, read, write = _queue(len(items)), *os.pipe()
    child = os.fork()
    if child == 0:
        _copy(work, items, queue, read, write)
    os.close(write)
    try:
        done = _taken(work, items, queue)
    finally:
        os.close(queue)
        with os.fdopen(read, "rb") as file:
            said = file.read()
        os.waitpid(child, 0)
    others: dict[int, Result] | BaseException = pickle.loads(said)
    if isinstance(others, BaseException):
        raise others
    return [found for _, found in sorted((done | others).items(), key=lambda pair: pair[0])]


def _queue(count: int) -> int:
    """A pipe from which both processes read the numbers of items, each once."""
    read, write = os.pipe()
    os.write(write, b"".join(at.to_bytes(NUMBER, "big") for at in range(count)))
    os.close(write)
    return read


def _taken(work: Callable[[Item], Result], items: Sequence[Item], queue: int) -> dict[int, Result]:
    """The results of the items that this process takes, by number."""
    numbers = iter(lambda: os.read(queue, NUMBER), b"")
    return {at: work(items[at]) for at in (int.from_bytes(number, "big") for number in numbers)}


def _copy(
    work: Callable[[Item], Result], items: Sequence[Item], queue: int, read: int, write: int
) -> None:
    """Does items, says what came of them, and ends without what this process does at its end."""
    try:
        os.close(read)
        try:
            found: object = _taken(work, items, queue)
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
