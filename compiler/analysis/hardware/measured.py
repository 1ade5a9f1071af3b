"""Measured seconds of products, attention, memory-bound ops and collectives, and what they say of sizes in between."""

from collections.abc import Sequence
from math import exp, log
from typing import Any, NamedTuple

from attrs import frozen

NEAR = 1.5
"""How far a product may be from the nearest measured one, in octaves of its three sizes together."""


class Product(NamedTuple):
    """`batch` products [m, k] · [k, n] of an element type."""

    dtype: str
    m: int
    n: int
    k: int
    batch: int
    seconds: float


class Attention(NamedTuple):
    """Attention of a kernel, heads' width and length: FLOP/s, the pairs that a causal mask lets through counted."""

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
        known = [it for it in self.products if it.dtype == dtype]
        if not known:
            return None
        near = sorted((_octaves((m, n, k), (it.m, it.n, it.k)), it.batch != batch, it) for it in known)[:4]
        away, _, nearest = near[0]
        if away > NEAR:
            return None
        if away == 0:
            return batch / nearest.batch * nearest.seconds
        rates = [(1 / (away * away + 1e-6), log(it.batch * it.m * it.n * it.k / it.seconds)) for away, _, it in near]
        mean = sum(weight * rate for weight, rate in rates) / sum(weight for weight, _ in rates)
        return batch * m * n * k / exp(mean)

    def attention_rate(self, kernel: str, width: float, length: float, *, backward: bool) -> float | None:
        """FLOP/s of attention by its length, at the measured width that is nearest."""
        known = [it for it in self.attention if it.kernel == kernel]
        if not known:
            return None
        nearest = min((abs(log(width / it.width)), it.width) for it in known)[1]
        points = [(it.length, it.backward if backward else it.forward) for it in known if it.width == nearest]
        return _between(points, length)

    def seconds_of(self, op: str, bytes: float) -> float | None:
        """Seconds of an op that only reads and writes."""
        return _reaching([(it.bytes, it.seconds) for it in self.moved if it.op == op], bytes)

    def collective(self, op: str, ranks: int, nodes: int, bytes: float) -> float | None:
        """Seconds of a collective over groups of this size on as many nodes."""
        known = [(it.bytes, it.seconds) for it in self.collectives if (it.op, it.ranks, it.nodes) == (op, ranks, nodes)]
        return _reaching(known, bytes)


def _octaves(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(log(x / y)) for x, y in zip(a, b, strict=True)) / log(2)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolated in logarithms of both, constant beyond the ends."""
    import numpy as np

    numpy: Any = np  # its types are those of arrays alone
    xs, ys = zip(*sorted((log(x), log(y)) for x, y in points), strict=True)
    return float(numpy.exp(numpy.interp(numpy.log(at), xs, ys)))


def _reaching(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """Seconds by bytes: a line between measured ones, beyond the largest in proportion, below the smallest as it."""
    if not points:
        return None
    import numpy as np

    numpy: Any = np
    most, seconds = max(points)
    xs, ys = zip(*sorted(points), (most * 2.0**20, seconds * 2.0**20), strict=True)
    return float(numpy.interp(at, xs, ys))
