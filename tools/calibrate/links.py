"""Measures the seconds of collectives and messages in groups of ranks: in one group alone, and in
all groups at once.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...runtime.comm import c10d
from .calls import Row
from .clock import REPEATS, Clock

LEAST = 1 << 12
"""Bytes of the smallest message; each message is four times the one before."""

LONG = 10.0
"""The most seconds for one size of one collective: larger sizes are left out."""

SLOW = 1.2
"""A node is named as slow where it takes this many times the median of all."""

Groups = Sequence[Sequence[int]]


class Links:
    """Figures of the links between ranks; all ranks measure together."""

    def __init__(self, wanted: Mapping[str, Any], clock: Clock, most: int) -> None:
        self.rows, self.notes = list[Row](), list[str]()
        self.issue_times = list[float]()
        """The seconds in which the host issues each of the smallest collectives; they mean
        something where the device is not the host itself.
        """
        self._clock, self._most, self._wanted = clock, most, wanted
        self._near = int(os.environ.get("LOCAL_WORLD_SIZE") or wanted["ranks_per_node"])

    def measure(self) -> None:
        """Measures the groups of the plans that these ranks make, and groups of 2, 4, … all
        nodes.
        """
        ranks = dist.get_world_size()
        sets = list[list[list[int]]]()
        for wanted in self._wanted["groups"]:
            sets.append([group for group in wanted["groups"] if max(group) < ranks])
        nodes = ranks // self._near
        for power in range(1, nodes.bit_length()):
            sets.append([[*range(self._near << power)]])
        measured = set[str]()
        for groups in sets:
            if groups and str(groups) not in measured:
                measured.add(str(groups))
                self._measure(groups)
        self.notes += self._slow_nodes()

    def links(self, memory: float) -> list[Row]:
        """The links within a node and between nodes, by messages from rank to rank; without
        messages, by the rate of memory.
        """
        link_of_memory = {"bandwidth": memory / 2, "latency": 0.0}
        within_node = {
            "name": "node",
            "ranks": self._near,
            **(self._link(1) or link_of_memory),
        }
        one_adapter = self._link(2) or within_node
        between_nodes = {
            "name": "adapters",
            "bandwidth": one_adapter["bandwidth"] * self._near,
            "latency": one_adapter["latency"],
        }
        return [within_node, between_nodes]

    def _link(self, nodes: int) -> Row | None:
        """The link of messages between ranks of so many nodes; None without messages."""
        sends = list[tuple[int, float]]()
        for row in self.rows:
            if row["op"] == "send" and row["nodes"] == nodes:
                sends.append((row["bytes"], row["seconds"]))
        if not sends:
            return None
        sends.sort()
        (least, first), (most, last) = sends[0], sends[-1]
        bandwidth = most / last
        if last > first:  # the slope leaves out the latency
            bandwidth = (most - least) / (last - first)
        return {"bandwidth": bandwidth, "latency": first}

    def _measure(self, groups: Groups) -> None:
        process_groups = [cast(Any, dist).new_group([*ranks]) for ranks in groups]
        number, group, place = None, None, ()  # of this rank's group
        for candidate, ranks in enumerate(groups):
            if dist.get_rank() in ranks:
                number, group, place = candidate, process_groups[candidate], ranks
                break
        group_alone = group if number == 0 else None
        for op, collective in OPS.items():
            size = LEAST
            ranks = self._pair(groups[0]) if op == "send" else groups[0]
            while size <= self._most:
                seconds = self._seconds(collective, group, place, size)
                alone = seconds
                if groups[1:]:
                    alone = self._seconds(collective, group_alone, place, size)
                self.rows.append(
                    {
                        "table": "collective",
                        "op": op,
                        "ranks": len(ranks),
                        "nodes": self._nodes(ranks),
                        "bytes": size,
                        "seconds": seconds,
                        "alone": alone,
                    }
                )
                if seconds * REPEATS > LONG:
                    break
                size *= 4

    def _nodes(self, ranks: Sequence[int]) -> int:
        return len({rank // self._near for rank in ranks})

    def _pair(self, group: Sequence[int]) -> Sequence[int]:
        """A rank that sends and the rank that it sends to: on different nodes if there is such a
        pair.
        """
        half = len(group) // 2
        pairs = [(group[place], group[place + half]) for place in range(half)]
        return max(pairs, key=self._nodes)

    def _seconds(
        self, collective: "Collective", group: Any, place: Sequence[int], size: int
    ) -> float:
        """The median seconds of the slowest rank; a rank without a `group` only waits."""
        call = _do_nothing
        if group is not None:
            call = collective(group, self._clock.device, len(place), size)
        seconds, issued, end = list[float](), list[float](), perf_counter() + LONG / 5
        for _ in range(REPEATS + 2):
            cast(Any, dist).barrier()
            start = perf_counter()
            call()
            issued.append(perf_counter() - start)
            self._clock.wait()
            own_seconds = perf_counter() - start
            stop = torch.tensor([perf_counter() - end, own_seconds], device=self._clock.device)
            cast(Any, dist).all_reduce(stop, op=dist.ReduceOp.MAX)
            seconds.append(float(stop[1]))
            if stop[0] > 0:
                break
        if size == LEAST and group is not None:
            self.issue_times.append(median(issued))
        return median(seconds[min(2, len(seconds) - 1) :])

    def _slow_nodes(self) -> Iterator[str]:
        """Names the nodes whose ranks take longer than others for a product."""
        x = torch.ones(1024, 1024, device=self._clock.device)
        own_seconds = self._clock.median(lambda: lambda: x @ x)
        of_ranks = [(0.0, "")] * dist.get_world_size()
        cast(Any, dist).all_gather_object(of_ranks, (own_seconds, socket.gethostname()))
        usual_seconds = median(seconds for seconds, _ in of_ranks)
        for name in sorted({name for seconds, name in of_ranks if seconds > SLOW * usual_seconds}):
            worst = max(seconds for seconds, other in of_ranks if other == name)
            yield (
                f"node {name} is slow: a product takes {worst / usual_seconds:.2f} times as long"
                " as on most ranks"
            )


# ---- collectives by their bytes, ready to be called


Collective = Callable[[Any, torch.device, int, int], Callable[[], None]]


def _do_nothing() -> None:
    """The call of a rank that is in no group."""


def _reduce(group: Any, device: torch.device, ranks: int, size: int) -> Callable[[], None]:
    x = torch.zeros(size // 4, device=device)
    return lambda: c10d.all_reduce(x, group)


def _between(
    call: Callable[[Tensor, Tensor, Any], None], *, makes_whole: bool, takes_whole: bool
) -> Collective:
    """A collective that makes one tensor of another; each is a rank's part, or all parts."""

    def prepare(group: Any, device: torch.device, ranks: int, size: int) -> Callable[[], None]:
        part = size // 4 // ranks
        out = torch.zeros(part * (ranks if makes_whole else 1), device=device)
        x = torch.zeros(part * (ranks if takes_whole else 1), device=device)
        return lambda: call(out, x, group)

    return prepare


def _send(group: Any, device: torch.device, ranks: int, size: int) -> Callable[[], None]:
    """A message from the first half of the ranks to the second half, so from node to node where
    there are two; the last of an odd number of ranks has none.
    """
    x, place, half = torch.zeros(size // 4, device=device), group.rank(), ranks // 2
    if place >= 2 * half:
        return lambda: None
    if place < half:
        return lambda: c10d.begin_send(x, group, place + half).wait()
    return lambda: c10d.begin_receive(x, group, place - half).wait()


OPS: dict[str, Collective] = {
    "all_reduce": _reduce,
    "all_gather": _between(c10d.all_gather, makes_whole=True, takes_whole=False),
    "reduce_scatter": _between(c10d.reduce_scatter, makes_whole=False, takes_whole=True),
    "all_to_all": _between(c10d.all_to_all, makes_whole=True, takes_whole=True),
    "send": _send,
}
