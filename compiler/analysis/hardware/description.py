"""A description of hardware as a rank sees it."""

from collections.abc import Mapping

from attrs import frozen

from .measured import Measured

DATA_SHEETS = "data sheets"
"""The source of figures that nobody has measured."""


@frozen
class Hardware:
    """A rank's GPU, its links to other ranks, its host.  Rates are per second, of bytes or operations.

    name            of the GPU
    peak            operations, by element type; of a type that is not there the least
    memory          read and written, by the data sheet
    sms             multiprocessors
    held            the part of the peak that large products hold in a long step, by element type; of others the least
    attention       the part of the peak that attention holds
    link            of a rank to others of its node, one way
    network         of a node to other nodes, one way
    ranks_per_node  neighbours in rank
    link_latency, network_latency  seconds of a message besides its bytes
    kernel          seconds that a kernel takes at least
    op, collective, action  seconds in which the host issues an op, a collective, an action of a pipeline
    synchronous     whether the host computes itself, as a CPU does: what it issues it does before it issues the next
    streamed        the part of `memory` that an op holds which only reads and writes
    contention      the part of the GPU's rate that is lost while it communicates
    measured        seconds that were measured, which win over all formulas
    source          where the figures come from
    error           of a predicted step to be expected, as a part of it
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    sms: int
    held: Mapping[str, float]
    attention: float
    link: float
    network: float
    ranks_per_node: int = 1
    link_latency: float = 5e-6
    network_latency: float = 17e-6
    kernel: float = 3e-6
    op: float = 6e-6
    collective: float = 20e-6
    action: float = 0.0
    synchronous: bool = False
    streamed: float = 0.81
    contention: float = 0.0
    measured: Measured = Measured()
    source: str = DATA_SHEETS
    error: float = 0.2

    def peak_rate(self, dtype: str) -> float:
        """Operations of an element type at the most."""
        return self.peak.get(dtype, min(self.peak.values()))

    def product_rate(self, dtype: str) -> float:
        """Operations of large products of an element type."""
        return self.peak_rate(dtype) * self.held.get(dtype, min(self.held.values()))

    @property
    def memory_rate(self) -> float:
        """Bytes of an op that only reads and writes."""
        return self.streamed * self.memory
