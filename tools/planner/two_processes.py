"""Work on items in two processes, where there are two cores: this one and a copy.  Each process
takes the next item when it is free.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

WORTH = 4
"""The least number of items for which a second process pays."""

NUMBER = 2
"""Bytes of an item's number; a pipe holds the numbers of 32,768 items."""


def in_two(
    work: Callable[[Item], Result], items: Sequence[Item], *, worth: int = WORTH
) -> list[Result]:
    """The results, in the order of items; fewer items than `worth` are done in this process.

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
        results = _work_on_queue(work, items, queue)
    finally:
        os.close(queue)
        with os.fdopen(read, "rb") as file:
            answer = file.read()
        os.waitpid(child, 0)
    others: dict[int, Result] | BaseException = pickle.loads(answer)
    if isinstance(others, BaseException):
        raise others
    results |= others
    return [results[number] for number in sorted(results)]


def _queue(count: int) -> int:
    """A pipe with the numbers of items; both processes read from it, each number once."""
    read, write = os.pipe()
    os.write(write, b"".join(number.to_bytes(NUMBER, "big") for number in range(count)))
    os.close(write)
    return read


def _work_on_queue(
    work: Callable[[Item], Result], items: Sequence[Item], queue: int
) -> dict[int, Result]:
    """The results of the items that this process takes, by number."""
    results = dict[int, Result]()
    while number_bytes := os.read(queue, NUMBER):
        number = int.from_bytes(number_bytes, "big")
        results[number] = work(items[number])
    return results


def _copy(
    work: Callable[[Item], Result], items: Sequence[Item], queue: int, read: int, write: int
) -> None:
    """Works on items, sends the results or the exception, and ends the process at once.

    It runs no handlers that this process runs at its end, since the parent runs them too.
    """
    try:
        os.close(read)
        try:
            answer: object = _work_on_queue(work, items, queue)
        except BaseException as error:
            answer = error
        with os.fdopen(write, "wb") as file:
            file.write(_to_pickle(answer))
    finally:
        os._exit(0)


def _to_pickle(answer: object) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
