"""The GPUs that there are, and the step that they do."""

from pathlib import Path

from attrs import frozen

from ...analysis.hardware import Hardware
from ...config.gpus import GIB, GPUS


@frozen
class Goal:
    """A number of GPUs, and the step that they do.

    hardware  one GPU and its links; `ranks_per_node` are the GPUs of a node
    file      of the cluster; None where data sheets serve
    """

    gpus: int
    hardware: Hardware
    global_batch: int
    seq: int
    file: Path | None = None

    @property
    def per_node(self) -> int:
        """GPUs of a node, at most all of them."""
        return min(self.hardware.ranks_per_node, self.gpus)

    @property
    def capacity(self) -> int | None:
        """Bytes of a GPU; None where that is not known."""
        found = GPUS.get(self.hardware.name)
        return found.memory * GIB if found else None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq
