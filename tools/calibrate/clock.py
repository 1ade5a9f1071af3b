"""Measures the seconds of work on a device: of each call by itself, on the GPU between events."""

from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch

REPEATS = 20
"""The least number of measurements of a call."""

CACHE = 1 << 27
"""Bytes that are more than any cache holds."""

Prepared = Callable[[], Callable[[], Any]]
"""Makes operands, and gives the call that is measured with them."""


class Clock:
    """The clock of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = cast(Any, torch.cuda) if device.type == "cuda" else None
        self._other = torch.zeros(CACHE, dtype=torch.uint8, device=device)

    def warm_up(self, seconds: float) -> None:
        """Holds the device under load, so that it is measured at rates that it can keep."""
        x = torch.ones(2048, 2048, device=self.device)
        end = perf_counter() + seconds
        while perf_counter() < end:
            for _ in range(10):
                torch.mm(x, x)
            self.wait()

    def cool(self, size: int = CACHE) -> None:
        """Empties all caches of less than `size` bytes of earlier values."""
        self._other[:size].fill_(1)

    def wait(self) -> None:
        """Waits until the device has done all that was begun."""
        if self._cuda:
            self._cuda.synchronize()

    def seconds_of_calls(self, calls: Iterable[Callable[[], Any]]) -> list[float]:
        """The seconds of calls, in their order.

        On the GPU, with all of them under way before the first begins, so that it does not wait for
        the host.
        """
        results = list[Any]()  # kept, as a step keeps the tensors that backward needs
        if self._cuda is None:
            seconds = list[float]()
            for call in calls:
                start = perf_counter()
                result = call()
                seconds.append(perf_counter() - start)
                results.append(result)
            return seconds
        spans = list[tuple[Any, Any]]()
        self._cuda._sleep(50_000_000)
        for call in calls:
            start = self._cuda.Event(enable_timing=True)
            stop = self._cuda.Event(enable_timing=True)
            start.record()
            results.append(call())
            stop.record()
            spans.append((start, stop))
        self.wait()
        return [start.elapsed_time(stop) / 1e3 for start, stop in spans]

    def median(self, prepare: Prepared, repeats: int = REPEATS) -> float:
        """The median seconds of calls, each with operands of its own."""
        return median(self.seconds_of_calls(prepare() for _ in range(repeats)))
