"""Seconds of collectives and messages in groups of ranks: of one group alone, and of all groups
at once.
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

from ..comm import c10d
from .calls import Row
from .clock import REPEATS, Clock

LEAST = 1 << 12
"""Bytes of the smallest message; each is four times the one before."""

LONG = 10.0
"""Seconds for one size of one collective, at most: larger ones are left out."""

SLOW = 1.2
"""By how much a node takes longer than the median of all where it is named."""

Groups = Sequence[Sequence[int]]


class Links:
    """Figures of the links between ranks; all ranks measure together."""

    def __init__(self, wanted: Mapping[str, Any], clock: Clock, most: int) -> None:
        self.rows, self.notes = list[Row](), list[str]()
        self.issued = list[float]()
        """The seconds in which the host issues each of the smallest collectives, where the
        device is no host itself.
        """
        self._clock, self._most, self._wanted = clock, most, wanted
        self._near = int(os.environ.get("LOCAL_WORLD_SIZE") or wanted["ranks_per_node"])

    def measure(self) -> None:
        """Measures the groups of the plans that these ranks make, and groups of 2, 4, … all
        nodes.
        """
        ranks = dist.get_world_size()
        sets = [
            [group for group in it["groups"] if max(group) < ranks] for it in self._wanted["groups"]
        ]
        nodes = ranks // self._near
        sets += [[[*range(self._near << power)]] for power in range(1, nodes.bit_length())]
        known = set[str]()
        for groups in sets:
            if groups and str(groups) not in known:
                known.add(str(groups))
                self._measure(groups)
        self.notes += self._slow_nodes()

    def links(self, memory: float) -> list[Row]:
        """The links by messages from rank to rank, within a node and between nodes; without
        any, of memory.
        """
        found = {name: self._link(nodes) for name, nodes in (("node", 1), ("adapters", 2))}
        nothing = {"bandwidth": memory / 2, "latency": 0.0}
        near = {"name": "node", "ranks": self._near, **(found["node"] or nothing)}
        far = found["adapters"] or near
        away = {
            "name": "adapters",
            "bandwidth": far["bandwidth"] * self._near,
            "latency": far["latency"],
        }
        return [near, away]

    def _link(self, nodes: int) -> Row | None:
        sends = sorted(
            (it["bytes"], it["seconds"])
            for it in self.rows
            if it["op"] == "send" and it["nodes"] == nodes
        )
        if not sends:
            return None
        (least, first), (most, last) = sends[0], sends[-1]
        return {
            "bandwidth": (most - least) / (last - first) if last > first else most / last,
            "latency": first,
        }

    def _measure(self, groups: Groups) -> None:
        made = [cast(Any, dist).new_group([*ranks]) for ranks in groups]
        own = next((at for at, ranks in enumerate(groups) if dist.get_rank() in ranks), None)
        group, place = (made[own], groups[own]) if own is not None else (None, ())
        for op, collective in OPS.items():
            size = LEAST
            while size <= self._most:
                among = self._pair(groups[0]) if op == "send" else groups[0]
                key = {
                    "table": "collective",
                    "op": op,
                    "ranks": len(among),
                    "nodes": self._nodes(among),
                }
                both = self._seconds(collective, group, place, size)
                alone = (
                    self._seconds(collective, group if own == 0 else None, place, size)
                    if groups[1:]
                    else both
                )
                self.rows.append({**key, "bytes": size, "seconds": both, "alone": alone})
                if both * REPEATS > LONG:
                    break
                size *= 4

    def _nodes(self, ranks: Sequence[int]) -> int:
        return len({rank // self._near for rank in ranks})

    def _pair(self, group: Sequence[int]) -> Sequence[int]:
        """A rank that sends and the one that it sends to, of different nodes if any two such
        ranks are.
        """
        pairs = [
            (rank, group[at + len(group) // 2]) for at, rank in enumerate(group[: len(group) // 2])
        ]
        return max(pairs, key=self._nodes)

    def _seconds(
        self, collective: "Collective", group: Any, place: Sequence[int], size: int
    ) -> float:
        """The median time of the slowest rank."""
        call = (
            collective(group, self._clock.device, len(place), size)
            if group is not None
            else lambda: None
        )
        found, issued, end = list[float](), list[float](), perf_counter() + LONG / 5
        for _ in range(REPEATS + 2):
            cast(Any, dist).barrier()
            start = perf_counter()
            call()
            issued.append(perf_counter() - start)
            self._clock.wait()
            found.append(perf_counter() - start)
            stop = torch.tensor([perf_counter() - end, found[-1]], device=self._clock.device)
            cast(Any, dist).all_reduce(stop, op=dist.ReduceOp.MAX)
            found[-1] = float(stop[1])
            if stop[0] > 0:
                break
        if size == LEAST and group is not None:
            self.issued.append(median(issued))
        return median(found[min(2, len(found) - 1) :])

    def _slow_nodes(self) -> Iterator[str]:
        """Names the nodes whose ranks take longer than others for a product."""
        x = torch.ones(1024, 1024, device=self._clock.device)
        own, each = self._clock.median(lambda: lambda: x @ x), [(0.0, "")] * dist.get_world_size()
        cast(Any, dist).all_gather_object(each, (own, socket.gethostname()))
        usual = median(seconds for seconds, _ in each)
        for name in sorted({name for seconds, name in each if seconds > SLOW * usual}):
            worst = max(seconds for seconds, other in each if other == name)
            yield (
                f"node {name} is slow: a product takes {worst / usual:.2f} times as long as on"
                " most ranks"
            )


# ---- collectives by their bytes, ready to be done


Collective = Callable[[Any, torch.device, int, int], Callable[[], None]]


def _reduce(group: Any, device: torch.device, ranks: int, size: int) -> Callable[[], None]:
    x = torch.zeros(size // 4, device=device)
    return lambda: c10d.all_reduce(x, group)


def _between(
    call: Callable[[Tensor, Tensor, Any], None], *, makes_whole: bool, takes_whole: bool
) -> Collective:
    """A collective that makes a tensor, of a rank's part or of all parts, of another one."""

    def prepared(group: Any, device: torch.device, ranks: int, size: int) -> Callable[[], None]:
        part = size // 4 // ranks
        out, x = (
            torch.zeros(part * (ranks if whole else 1), device=device)
            for whole in (makes_whole, takes_whole)
        )
        return lambda: call(out, x, group)

    return prepared


def _send(group: Any, device: torch.device, ranks: int, size: int) -> Callable[[], None]:
    """From the first half of the ranks to the second, so from node to node where there are two;
    an odd one has none.
    """
    x, at, half = torch.zeros(size // 4, device=device), group.rank(), ranks // 2
    if at >= 2 * half:
        return lambda: None
    begin, peer = (c10d.begin_send, at + half) if at < half else (c10d.begin_receive, at - half)
    return lambda: begin(x, group, peer).wait()


OPS: dict[str, Collective] = {
    "all_reduce": _reduce,
    "all_gather": _between(c10d.all_gather, makes_whole=True, takes_whole=False),
    "reduce_scatter": _between(c10d.reduce_scatter, makes_whole=False, takes_whole=True),
    "all_to_all": _between(c10d.all_to_all, makes_whole=True, takes_whole=True),
    "send": _send,
}
