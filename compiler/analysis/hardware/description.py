"""A description of hardware as a rank sees it: rates, and measured seconds, which are interpolated
for sizes in between.
"""

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any, NamedTuple

from attrs import field, frozen

from ...syntax.diagnostics import wrong
from ...syntax.source import Source, Span

NEAR = 1.5
"""How far a product may be from the nearest measured one, in octaves of its three sizes
together.
"""


class Product(NamedTuple):
    """`batch` products [m, k] · [k, n] of an element type."""

    dtype: str
    m: int
    n: int
    k: int
    batch: int
    seconds: float


class Attention(NamedTuple):
    """Attention of a kernel, heads' width and length: FLOP/s, the pairs that a causal mask lets
    through counted.
    """

    kernel: str
    width: int
    length: int
    forward: float
    backward: float


class Moved(NamedTuple):
    """An op that only reads and writes: all its bytes."""

    op: str
    bytes: int
    seconds: float


class Collective(NamedTuple):
    """A collective of `ranks` ranks on `nodes` nodes; bytes of the whole tensor."""

    op: str
    ranks: int
    nodes: int
    bytes: int
    seconds: float


@frozen
class Measured:
    """Measured figures; each method gives None where they say nothing of the sizes asked for."""

    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    moved: tuple[Moved, ...] = ()
    collectives: tuple[Collective, ...] = ()

    def product(self, dtype: str, m: float, n: float, k: float, batch: float) -> float | None:
        """Seconds of products: by the rates of measured ones, the nearer the more."""
        distances = list[tuple[float, bool, Product]]()
        for row in self.products:
            if row.dtype == dtype:
                distance = _octaves((m, n, k), (row.m, row.n, row.k))
                distances.append((distance, row.batch != batch, row))
        if not distances:
            return None
        near = sorted(distances)[:4]
        least, _, nearest = near[0]
        if least > NEAR:
            return None
        if least == 0:
            return batch / nearest.batch * nearest.seconds
        weights, weighed_rates = list[float](), list[float]()
        for distance, _, row in near:
            weight = 1 / (distance * distance + 1e-6)
            weights.append(weight)
            weighed_rates.append(weight * log(row.batch * row.m * row.n * row.k / row.seconds))
        return batch * m * n * k / exp(sum(weighed_rates) / sum(weights))

    def attention_rate(
        self, kernel: str, width: float, length: float, *, backward: bool
    ) -> float | None:
        """FLOP/s of attention by its length, at the measured width that is nearest."""
        rows = [row for row in self.attention if row.kernel == kernel]
        if not rows:
            return None
        _, nearest = min((abs(log(width / row.width)), row.width) for row in rows)
        points = list[tuple[float, float]]()
        for row in rows:
            if row.width == nearest:
                points.append((row.length, row.backward if backward else row.forward))
        return _interpolate_logarithms(points, length)

    def seconds_of(self, op: str, bytes: float) -> float | None:
        """Seconds of an op that only reads and writes."""
        points = [(row.bytes, row.seconds) for row in self.moved if row.op == op]
        return _interpolate_seconds(points, bytes)

    def collective(self, op: str, ranks: int, nodes: int, bytes: float) -> float | None:
        """Seconds of a collective over groups of this size on as many nodes."""
        points = list[tuple[float, float]]()
        for row in self.collectives:
            if (row.op, row.ranks, row.nodes) == (op, ranks, nodes):
                points.append((row.bytes, row.seconds))
        return _interpolate_seconds(points, bytes)


def _octaves(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(log(x / y)) for x, y in zip(a, b, strict=True)) / log(2)


def _interpolate_logarithms(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x`, interpolated in logarithms of both, constant beyond the ends."""
    import numpy as np

    numpy: Any = np  # its types know arrays alone
    xs, ys = zip(*sorted((log(x), log(y)) for x, y in points), strict=True)
    return float(numpy.exp(numpy.interp(numpy.log(x), xs, ys)))


def _interpolate_seconds(points: Sequence[tuple[float, float]], bytes: float) -> float | None:
    """Seconds by bytes: on a line between measured points, beyond the largest in proportion; below
    the smallest, as long as it takes.  None without points.
    """
    if not points:
        return None
    import numpy as np

    numpy: Any = np
    most, seconds = max(points)
    xs, ys = zip(*sorted(points), (most * 2.0**20, seconds * 2.0**20), strict=True)
    return float(numpy.interp(bytes, xs, ys))


FLASH = "flash2"
"""FlashAttention-2 among the kernels of `Measured.attention`."""

KERNELS = (FLASH, "cudnn")
"""The kernels that torch picks from for attention."""

DATA_SHEETS = "data sheets"
"""The source of figures that nobody has measured."""


@frozen
class Hardware:
    """A rank's GPU, its links to other ranks, its host.  Rates are per second, of bytes or
    operations.

    name            of the GPU
    peak            operations, by element type
    memory          read and written, by the data sheet
    sms             multiprocessors
    held            the part of the peak that large products hold in a long step, by element type;
                    other types hold the least of these
    attention       the part of the peak that attention holds, where no rates are known
    torch_attention  the kernel that torch takes for attention on this GPU: `flash2`, `cudnn`
    link            of a rank to others of its node, one way
    network         of a node to other nodes, one way
    ranks_per_node  neighbours in rank
    link_latency, network_latency  seconds of a message besides its bytes
    kernel          seconds that a kernel takes at least
    op, collective, action  seconds that the host takes to issue an op, a collective, an action of a
                            pipeline
    synchronous     whether the host computes itself, as a CPU does: what it issues it does before
                    it issues the next
    streamed        the part of `memory` that is held by an op which only reads and writes
    contention      the part of the GPU's rate that is lost while it communicates
    measured        seconds that were measured, which win over all formulas
    source          where the figures come from
    error           the error to be expected of a predicted step, as a part of it
    span            where the figures are read, or the plan names their file
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
    torch_attention: str = FLASH
    measured: Measured = Measured()
    source: str = DATA_SHEETS
    error: float = 0.2
    span: Span = field(default=Source("hardware", "").whole(), eq=False, repr=False)

    def peak_rate(self, dtype: str) -> float:
        """Operations of an element type at the most.

        Raises PlanError where the figures lack it.
        """
        if dtype not in self.peak:
            # any other type's rate would be off by up to two orders of magnitude
            known = ", ".join(f"`{name}`" for name in self.peak)
            message = (
                f"the peak of `{self.name}` for `{dtype}` is not known: {self.source} has {known}"
            )
            help = f"add `{dtype} = …`, in operations a second, to `peak` in `[gpu]`"
            raise wrong("E0418", message, self.span, help=help)
        return self.peak[dtype]

    def product_rate(self, dtype: str) -> float:
        """Operations of large products of an element type."""
        return self.peak_rate(dtype) * self.held.get(dtype, min(self.held.values()))

    @property
    def memory_rate(self) -> float:
        """Bytes of an op that only reads and writes."""
        return self.streamed * self.memory
