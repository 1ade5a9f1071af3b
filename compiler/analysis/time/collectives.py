"""Seconds of a collective over links, by the algorithms that NCCL chooses from.

The algorithms and the constants below come from NCCL's own model of time (NVIDIA/nccl 2.30,
src/graph/tuning.cc).  There a step of a ring takes 3.4 us within a node and 14 us between nodes,
before what the network adds; `link_latency` and `network_latency` are the same for a cluster.  Its
protocols for small messages (LL, LL128) are left out: published measurements of small messages take
as long as its `Simple` says, or longer.

Non-goals: measured collectives, which win over all formulas (`seconds`).
"""

from typing import Any

from attrs import frozen

from ..link_traffic import HALVES

Size = Any
"""A number, or a numpy array with one for each of many plans: so a message may have them."""

PLATEAU = 1.4
"""How many times longer the steps of a ring's all-reduce between nodes are than a gather's."""

TREE_RATE = 0.92
"""The part of a ring's bandwidth that a tree holds."""

PAT_RATE, PAT_LEVELS, PAT_RANK = 0.75, 3.5, 2.8e-6
"""PAT, which gathers and scatters by a tree where each node has one rank: the part of a ring's
bandwidth that it holds, how many of its levels take a network's latency, and seconds that each rank
adds."""


@frozen
class Group:
    """A group of ranks that communicate; rates are of a rank, one way, in bytes a second.

    near     ranks that share a node
    network  the rank's part of its node's adapters
    tree     the part of a ring's bandwidth that a tree holds
    """

    ranks: Size
    near: Size
    link: Size
    network: Size
    link_latency: Size
    network_latency: Size
    tree: Size = TREE_RATE

    @property
    def nodes(self) -> Size:
        """How many nodes the group spans."""
        return self.ranks / self.near

    def get_move_seconds(self, whole: Size) -> Size:
        """Seconds that half an all-reduce of `whole` bytes takes over the slower links."""
        sent = whole * (self.ranks - 1) / self.ranks
        away = self.near < self.ranks  # a bool counts as 0 or 1
        return larger(away * sent / (self.network * self.near), (self.near > 1) * sent / self.link)

    def ring_latency(self) -> Size:
        """Seconds of the ranks - 1 steps of a ring; the steps between nodes take longer."""
        within, across = self.ranks - self.nodes, self.nodes - 1
        return within * self.link_latency + across * self.network_latency

    def tree_latency(self) -> Size:
        """Seconds from a tree's leaves to its root: along each node's ranks, then over levels
        of nodes.
        """
        return (self.near - 1) * self.link_latency + levels(self.nodes) * self.network_latency


def get_collective_seconds(op: str, whole: Size, group: Group) -> Size:
    """Seconds of an all-reduce, a gather or a scatter of `whole` bytes, by the fastest of its
    algorithms.
    """
    moved, ring = group.get_move_seconds(whole), group.ring_latency()
    if HALVES[op] == 2:
        steps = ring * (1 + (PLATEAU - 1) * (group.near < group.ranks))
        by_tree = moved / group.tree + group.tree_latency()
        return 2 * smaller(moved + steps, by_tree)
    by_levels = levels(group.nodes) * group.network_latency / PAT_LEVELS + group.ranks * PAT_RANK
    by_pat = moved / PAT_RATE + by_levels
    # where a node has several ranks there is only the ring
    return larger(smaller(moved + ring, by_pat), (group.near > 1) * (moved + ring))


def larger(first: Size, second: Size) -> Size:
    """The larger of two; of arrays, one by one."""
    if isinstance(first, int | float) and isinstance(second, int | float):
        return max(first, second)
    from numpy import maximum

    return maximum(first, second)


def smaller(first: Size, second: Size) -> Size:
    """The smaller of two; of arrays, one by one."""
    return -larger(-first, -second)


def levels(nodes: Size) -> Size:
    """The height of a tree of `nodes` nodes; 0 of one."""
    from math import ceil, log2

    if isinstance(nodes, int | float):
        return ceil(log2(nodes))
    import numpy as np

    return np.ceil(np.log2(nodes))
