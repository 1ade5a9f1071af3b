"""Two gloo ranks on which our way and a peer's take turns, for benchmarks beside a peer.

All ways of a comparison give the same tensors, which is tested before anything is timed.  Host time
is CPU time of the thread that runs a pass on rank 0; gloo's own threads are not in it.  With more
threads than cores, wall time is also the waiting for one another's turn: its ratio says less than
that of host time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from measure import in_turns, ratio, table
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

RANKS = 2
Step = Callable[[], tuple[Tensor, ...]]
"""One pass; its results, which are the same in all ways of a comparison."""


class Cost(NamedTuple):
    """Seconds of a pass: of the thread that runs it, and of the clock."""

    host: float
    wall: float


@dataclass(frozen=True)
class Comparison:
    """Ways to do one thing, by name; `ways` makes them on a rank, once the process group is
    there.
    """

    title: str
    ways: Callable[[int], Mapping[str, Step]]
    reference: str


def compare(comparisons: list[Comparison], rounds: int, port: int) -> None:
    """Prints a table of each comparison."""
    start_processes(
        _compare_on_rank, (comparisons, rounds, port), nprocs=RANKS, start_method="fork"
    )


def _compare_on_rank(rank: int, comparisons: list[Comparison], rounds: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    for comparison in comparisons:
        torch.manual_seed(rank)
        ways = comparison.ways(rank)
        _check(ways, comparison.reference)
        costs = in_turns({name: partial(_timed, step) for name, step in ways.items()}, rounds)
        if rank == 0:
            columns = ("", "host time", "wall time", "host time, ratio", "wall time, ratio")
            table(comparison.title, columns, _rows(costs, comparison.reference))
    dist.destroy_process_group()


def _check(ways: Mapping[str, Step], reference: str) -> None:
    """Raises AssertionError where a way gives other tensors than the reference."""
    expected = ways[reference]()
    for name, step in ways.items():
        for value, due in zip(step(), expected, strict=True):
            torch.testing.assert_close(
                value, due, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


def _timed(step: Step) -> Cost:
    dist.barrier()
    host, wall = thread_time(), perf_counter()
    step()
    return Cost(thread_time() - host, perf_counter() - wall)


def _rows(costs: Mapping[str, list[Cost]], reference: str) -> list[tuple[str, ...]]:
    return [_row(name, own, costs[reference]) for name, own in costs.items()]


def _row(name: str, own: list[Cost], of_reference: list[Cost]) -> tuple[str, ...]:
    host = [cost.host for cost in own]
    wall = [cost.wall for cost in own]
    times = (f"{median(each) * 1e3:.2f} ms" for each in (host, wall))
    against = ([cost.host for cost in of_reference], [cost.wall for cost in of_reference])
    ratios = (ratio(each, other) for each, other in zip((host, wall), against, strict=True))
    return (name, *times, *ratios)
