"""The calls by which `scalec calibrate` measures products: those of plans, and others between these."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..ops.protocol import FUNCTIONAL
from ..ops.work import Product

Json = dict[str, Any]

GRID = 20
"""How many products of other shapes than the plans' are measured, each with its two gradients: 60 shapes."""


def product_call(dtype: str, it: Product) -> Json:
    """A product as emitted programs make it, whose backward makes two others."""

    def factor(*shape: int, warm: bool) -> Json:
        return tensor(shape if it.batch == 1 else (it.batch, *shape), dtype, warm=warm)

    def row(m: int, n: int, k: int) -> Json:
        return {"table": "product", "dtype": dtype, "m": m, "n": n, "k": k, "batch": it.batch}

    weight = factor(it.n, it.k, warm=False) if it.batch == 1 else factor(it.k, it.n, warm=True)
    return {
        "call": "linear(x0, x1)" if it.batch == 1 else "x0 @ x1",
        "module": FUNCTIONAL,
        "inputs": {"x0": factor(it.m, it.k, warm=True), "x1": weight},
        "row": row(it.m, it.n, it.k),
        "backward": [{"wrt": [0], "row": row(it.m, it.k, it.n)}, {"wrt": [1], "row": row(it.n, it.k, it.m)}],
    }


def tensor(shape: Sequence[int], dtype: str, below: int = 0, *, warm: bool) -> Json:
    """An operand, of integers `below` a size; `warm` if it has just been made, and so may lie in a cache."""
    return {"shape": [*shape], "dtype": dtype, "below": below, "warm": warm}


def grid(products: Sequence[Json]) -> Iterator[Json]:
    """Products between the least and the largest of the plans': points of the sequence of Halton, in logarithms."""
    plain = [it for it in products if it["batch"] == 1]
    if not plain:
        return
    ends = [(min(it[key] for it in plain), max(it[key] for it in plain)) for key in "mnk"]
    for point in range(1, GRID + 1):
        sizes = (
            round(least * (most / least) ** _halton(point, base) / 8) * 8 or 8
            for (least, most), base in zip(ends, (2, 3, 5), strict=True)
        )
        yield product_call(plain[0]["dtype"], Product(*sizes))


def _halton(index: int, base: int) -> float:
    """A point in [0, 1) of van der Corput's sequence: the digits of its index, mirrored."""
    found, part = 0.0, 1.0
    while index:
        part /= base
        index, digit = divmod(index, base)
        found += part * digit
    return found
