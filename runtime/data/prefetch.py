"""The next batch, made by a thread while a step runs."""

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class Ahead(Generic[_T]):
    """Calls `make` for consecutive numbers below `end`, one ahead: while a number's result is used,
    the next one is made.

    An error is raised when its number is asked for.
    """

    def __init__(self, make: Callable[[int], _T], end: int, pool: ThreadPoolExecutor) -> None:
        self._make, self._end, self._pool = make, end, pool
        self._next: dict[int, Future[_T]] = {}

    def get_batch(self, number: int) -> _T:
        """The result for a number.  Raises what `make` has raised for it."""
        batch = (self._next.pop(number, None) or self._pool.submit(self._make, number)).result()
        if number + 1 < self._end:
            self._next = {number + 1: self._pool.submit(self._make, number + 1)}
        return batch


@contextmanager
def ahead(make: Callable[[int], _T], end: int, device: torch.device) -> Generator[Ahead[_T]]:
    """An `Ahead` with a thread of its own, which has this device as its current one if it is a GPU.

    The thread computes alone, so that the step has the other threads of torch.  On leaving, it ends
    when it has made its current batch; nobody waits for it, as a file may not answer.
    """
    threads, pool = torch.get_num_threads(), ThreadPoolExecutor(1, "batches")
    try:
        pool.submit(_settle, device).result()
        # of threads yet to come, which would take the number of the last that set one
        torch.set_num_threads(threads)
        yield Ahead(make, end, pool)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _settle(device: torch.device) -> None:
    torch.get_num_threads()  # else this thread takes the number of others when it first computes
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or pinned memory would take a context on GPU 0 too
