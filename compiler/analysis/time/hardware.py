"""The hardware that a step runs on, as data: a GPU, its links, the host.

Non-goals: seconds of an op (`seconds`), memory (`config.gpus`).
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attrs import Factory, evolve, frozen

from ...config.settings import Cluster
from ...ir import Program


@frozen
class Hardware:
    """One rank's GPU and what it has to do with others.  Rates are per second, of bytes or operations.

    name            of the GPU
    peak            operations, by element type
    memory          read and written
    sms             multiprocessors
    held            the part of the peak that large products hold
    attention       the part of the peak that attention holds
    link            of a rank to others of its node, one way
    network         of a node to other nodes, one way
    ranks_per_node  neighbours in rank
    link_latency, network_latency  seconds of a message besides its bytes
    kernel          seconds that a kernel takes at least
    op, collective  seconds in which the host issues one
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    sms: int
    held: float
    attention: float
    link: float
    network: float
    ranks_per_node: int = 1
    link_latency: float = 5e-6
    network_latency: float = 17e-6
    kernel: float = 3e-6
    op: float = 6e-6
    collective: float = 20e-6
    streamed: float = Factory(lambda self: 0.81 * self.memory, takes_self=True)
    """What of `memory` an op holds that only reads and writes."""


def hardware(program: Program) -> Hardware | None:
    """The hardware of a plan's cluster, by data sheets; None where these do not know its GPU."""
    found = named(program.cluster.gpu)
    return evolve(found, ranks_per_node=ranks_per_node(program)) if found else None


def named(gpu: str) -> Hardware | None:
    """A GPU by its data sheet, alone on its node; None where there is none of that name."""
    found = _gpus().get(gpu)
    return Hardware(gpu, **found) if found else None


def ranks_per_node(program: Program) -> int:
    """The number of ranks on a node, as the plan says or as its nodes share them."""
    cluster: Cluster = program.cluster
    ranks = program.degree(tuple(axis.name for axis in program.axes))
    return cluster.gpus_per_node or max(ranks // cluster.nodes, 1)


@cache
def _gpus() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
