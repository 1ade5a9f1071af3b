"""Steps of many rows as arrays: their work, one entry for each op of each row, and what they
ran on.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from scalec.compiler.analysis.hardware import Hardware
from scalec.compiler.analysis.time.seconds import LENGTH, NARROW, TILES, WIDTH

from .plans import degree
from .rows import Row
from .stages import stage_layers
from .work import PLACES, Microbatch

Array = Any
"""An array of numpy's, of numbers."""

AXES = ("tp", "cp", "dp", "pp")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "rotate", "all_to_all")

KERNELS = {"flash2": "flash2", "flash_triton": "flash2", "flash_cudnn": "flash3"}
"""The kernel whose published rates serve for a row's."""

RATED = {"flash2": 0.34, "flash3": 0.6}
"""Forward's part of a newer GPU's peak that long attention holds, where nobody has published
rates of it.
"""


@frozen
class Entries:
    """Ops of all rows: which row's, where in the model (`work.PLACES`), and the columns of
    `work.Microbatch`.
    """

    row: Array
    place: Array
    columns: tuple[Array, ...]

    def sums(self, seconds: Array, rows: int) -> Array:
        """Seconds by row and place."""
        places = len(PLACES)
        weights = seconds * self.columns[-1]
        return np.bincount(
            self.row * places + self.place, weights, minlength=rows * places
        ).reshape(rows, places)


@frozen
class Batch:
    """Rows and their work; arrays have a number for each row, but those of entries."""

    rows: Sequence[Row]
    hardware: Sequence[Hardware]
    products: Entries
    filled: Array
    scores: Entries
    score_rate: Array
    score_filled: tuple[Array, Array]
    moved: Entries
    messages: Entries
    kernels: Array
    """How many a microbatch starts, by row and place."""
    layers: Array
    """By row and rank of the pipeline."""
    layers_balanced: Array
    params: Array
    logits: Array
    _known: dict[tuple[str, ...], Array] = field(factory=dict, init=False, eq=False, repr=False)
    """Arrays that were asked for: a fit asks for the same ones thousands of times."""

    def number(self, column: str) -> Array:
        """A column of degrees or counts; 1 where a row says nothing."""
        return self._array(("number", column), (float(row[column] or 1) for row in self.rows))

    def whether(self, column: str, *words: str) -> Array:
        """Whether a column has one of some words, or of several words one."""
        wanted = {*words}
        has_one = (not wanted.isdisjoint((row[column] or "").split()) for row in self.rows)
        return self._array(("whether", column, *words), has_one)

    def on(self, figure: str) -> Array:
        """A figure of the rows' hardware."""
        return self._array(
            ("on", figure), (float(getattr(hardware, figure)) for hardware in self.hardware)
        )

    def _array(self, name: tuple[str, ...], values: Iterable[float]) -> Array:
        """The array of a name, of these values when it is asked for first."""
        if name not in self._known:
            self._known[name] = np.array([*values])
        return self._known[name]


def batch(rows: Sequence[Row], work: Sequence[Microbatch], hardware: Sequence[Hardware]) -> Batch:
    """The batch of rows, their work and their hardware."""
    sms = np.array([float(it.sms) for it in hardware])
    products, scores = (
        _entries([it.products for it in work], 6),
        _entries([it.scores for it in work], 6),
    )
    _, m, n, _, count, _ = products.columns
    heads, length, _, width, _, _ = scores.columns
    moved = _entries([it.moved for it in work], 3)
    started = (
        (products, np.ones_like(m)),
        (scores, np.ones_like(heads)),
        (moved, moved.columns[1]),
    )
    of = sms[scores.row]
    ways = [
        [_layers(row, it, balanced) for row, it in zip(rows, work, strict=True)]
        for balanced in (False, True)
    ]
    return Batch(
        rows,
        hardware,
        products,
        _filled(m, n, count, sms[products.row]),
        scores,
        _rates(rows, hardware, scores),
        (_filled(length, length, heads, of), _filled(length, width, heads, of)),
        moved,
        _entries([[_numbered(each) for each in it.messages] for it in work], 6),
        sum(entries.sums(kernels, len(rows)) for entries, kernels in started),
        _padded(ways[0]),
        _padded(ways[1]),
        np.array([it.params for it in work]),
        np.array([it.logits for it in work]),
    )


def _numbered(message: tuple[Any, ...]) -> tuple[float, ...]:
    place, axis, op, *rest = message
    return (place, AXES.index(axis), OPS.index(op), *rest)


def _entries(of_rows: Sequence[Sequence[tuple[Any, ...]]], columns: int) -> Entries:
    flat = np.array([(at, *it) for at, each in enumerate(of_rows) for it in each], dtype=float)
    row, place, *rest = flat.T if flat.size else np.zeros((2 + columns, 0))
    return Entries(row.astype(int), place.astype(int), tuple(rest))


def _filled(m: Array, n: Array, count: Array, sms: Array) -> Array:
    """As `seconds` has it: the part of the multiprocessors' time that makes elements of the
    result.
    """
    best = np.zeros_like(m)
    for rows, columns in TILES:
        tiles = count * np.ceil(m / rows) * np.ceil(n / columns)
        best = np.maximum(best, count * m * n / (rows * columns) / (np.ceil(tiles / sms) * sms))
    return best


def _rates(rows: Sequence[Row], hardware: Sequence[Hardware], scores: Entries) -> Array:
    _, length, _, width, backward, _ = scores.columns
    entries = zip(scores.row, length, width, backward, strict=True)
    return np.array([_rate(rows[at], hardware[at], *sizes) for at, *sizes in entries])


def _rate(row: Row, on: Hardware, length: float, width: float, backward: float) -> float:
    """FLOP/s of attention by its kernel, from published rates if there are any of this GPU."""
    kernel = KERNELS.get(row["attention"], "flash2")
    known = on.measured.attention_rate(kernel, width, length, backward=backward > 0)
    if known is not None:
        return float(known)
    narrow = min(1.0, width / WIDTH) ** NARROW
    rate = RATED[kernel] if kernel == "flash3" else on.attention
    return on.peak["bf16"] * rate * narrow * length / (length + LENGTH) * (0.8 if backward else 1.0)


def _layers(row: Row, work: Microbatch, balanced: bool) -> list[float]:
    inner, *outer = work.params
    return stage_layers(
        work.layers, degree(row, "pp"), degree(row, "vpp"), max(outer) / inner if balanced else None
    )


def _padded(each: Sequence[Sequence[float]]) -> Array:
    """Rows of different lengths as one array; a rank that is not there has -1 layers."""
    found = np.full((len(each), max(map(len, each))), -1.0)
    for at, it in enumerate(each):
        found[at, : len(it)] = it
    return found
