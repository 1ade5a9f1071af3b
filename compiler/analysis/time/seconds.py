"""Seconds of work on a GPU, and of a collective over its links.

Formulas of data sheets: products by the peak that is held, by how many tiles fill the GPU's multiprocessors and by how
long their sums are; attention by its length and width; the rest by bytes.  Collectives as rings send them.
"""

from math import ceil

from ...ir import ITEM_BYTES, Program
from ...ops import Message
from ...ops.work import Product, Scores, Work
from ..link_traffic import HALVES
from .hardware import Hardware

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Rows and columns of a product that a multiprocessor makes at a time: the best of these."""

SHORT = 64
"""The length of sums at which a product runs at half of what long ones do."""

LENGTH, WIDTH, NARROW = 370, 128, 0.17
"""Attention of `LENGTH` positions runs at half of what long ones do; below a width of `WIDTH` by this power of it."""


def of_work(work: Work, on: Hardware) -> dict[str, float]:
    """Seconds by kind: `products`, `attention`, `memory-bound`; none where nothing is done."""
    found = {"products": sum(_product(each, work.dtype, on) for each in work.products)}
    found |= {"attention": _attention(work.scores, work.dtype, on) if work.scores else 0.0}
    found |= {"memory-bound": max(work.bytes / on.streamed, on.kernel * work.kernels) if work.bytes else 0.0}
    return {kind: seconds for kind, seconds in found.items() if seconds}


def _product(it: Product, dtype: str, on: Hardware) -> float:
    filled = max(_filled(it, *tile, on.sms) for tile in TILES)
    held = on.peak[dtype] * on.held * filled * it.k / (it.k + SHORT)
    return max(it.operations / held, it.elements * ITEM_BYTES[dtype] / on.streamed) + on.kernel


def _filled(it: Product, rows: int, columns: int, sms: int) -> float:
    """The part of the multiprocessors' time that makes elements of the result, and not padding or nothing."""
    tiles = it.batch * ceil(it.m / rows) * ceil(it.n / columns)
    useful = it.batch * it.m * it.n / (rows * columns)
    return useful / (ceil(tiles / sms) * sms)


def _attention(it: Scores, dtype: str, on: Hardware) -> float:
    narrow = min(1.0, it.width / WIDTH) ** NARROW
    return it.operations / (on.peak[dtype] * on.attention * narrow * it.length / (it.length + LENGTH)) + on.kernel


def of_message(program: Program, message: Message, on: Hardware, elements: int) -> float:
    """Seconds of a message with `elements` elements as its input, from when all ranks of its group have begun.

    Groups over the same axes send at the same time, and share a node's adapters.
    """
    ranks = len(message.among) or program.degree(message.axes)
    if ranks == 1:
        return 0.0
    near = min(_near(program, message.axes, on.ranks_per_node), ranks)
    size = elements * ITEM_BYTES[message.dtype]
    own = on.network / on.ranks_per_node
    if message.op == "rotate":
        return max(1, message.hops) * (size / (own if near < ranks else on.link) + _latency(near < ranks, on))
    whole = size * (ranks if message.op == "all_gather" else 1)
    if message.op == "all_to_all":
        away = whole * (ranks - near) / ranks
        return max(whole * (near - 1) / ranks / on.link, away / own) + _latency(near < ranks, on)
    sent, steps = HALVES[message.op] * whole * (ranks - 1) / ranks, HALVES[message.op]
    across = sent / (own * near) if near < ranks else 0.0
    within = sent / on.link if near > 1 else 0.0
    hops = (near - 1) * on.link_latency + ceil(ranks / near - 1).bit_length() * on.network_latency
    return max(across, within) + steps * hops


def _latency(away: bool, on: Hardware) -> float:
    return on.network_latency if away else on.link_latency


def _near(program: Program, axes: tuple[str, ...], ranks_per_node: int) -> int:
    """The number of ranks of a group over `axes` that share a node; ranks count the mesh's last axis innermost."""
    offsets, stride = [0], 1  # of the group of rank 0
    for axis in reversed(program.axes):
        if axis.name in axes:
            offsets = [place * stride + at for place in range(axis.size) for at in offsets if at < ranks_per_node]
        stride *= axis.size
    return sum(offset < ranks_per_node for offset in offsets)
