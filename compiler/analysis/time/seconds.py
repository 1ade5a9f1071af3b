"""Seconds of work on a GPU, and of a collective over its links.

Formulas of data sheets: products by the peak that is held, by how many tiles fill the GPU's
multiprocessors and by how long their sums are; attention by its length and width; the rest by
bytes.
"""

from ...ir import ITEM_BYTES, Op, Program
from ...ops import Message
from ...ops.attention import ATTENTION
from ...ops.vjp import KIND as VJP
from ...ops.work import Product, Scores, Work
from ..hardware import FLASH, Hardware
from ..link_traffic import crosses
from .collectives import Group, Size, get_collective_seconds, larger, smaller

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Rows and columns of a product that a multiprocessor makes at a time: the best of these."""

SHORT = 64
"""The length of sums at which a product runs at half of what long ones do."""

LENGTH, WIDTH, NARROW = 370, 128, 0.17
"""Attention of `LENGTH` positions runs at half of what long ones do; below a width of `WIDTH`
by this power of it.
"""

PUBLISHED = ("bf16", "f16")
"""The element types in which kernels for attention were timed that a GPU's file names."""


def of_work(op: str, work: Work, on: Hardware) -> dict[str, float]:
    """Seconds by kind: `products`, `attention`, `memory-bound`; none where nothing is done.

    `op` is what measured seconds of memory-bound ops go by (`measured_as`).
    """
    found = dict[str, float]()
    if work.products:
        found["products"] = sum(_product(each, work.dtype, on) for each in work.products)
    if work.scores:
        found["attention"] = _attention(work.scores, work.dtype, on)
    if work.bytes:
        own = on.measured.seconds_of(op, work.bytes)
        found["memory-bound"] = (
            max(work.bytes / on.memory_rate, on.kernel * work.kernels) if own is None else own
        )
    return found


def measured_as(op: Op) -> str:
    """The name of an op among measured ones: its kind, of a gradient that of its op and the
    operands.
    """
    return " ".join((op.kind, str(op.get("of")), *op.names("wrt"))) if op.kind == VJP else op.kind


def _product(it: Product, dtype: str, on: Hardware) -> float:
    own = on.measured.product(dtype, it.m, it.n, it.k, it.batch)
    if own is not None:
        return own
    filled = max(_filled(it, *tile, on.sms) for tile in TILES)
    held = on.product_rate(dtype) * filled * it.k / (it.k + SHORT)
    return max(it.operations / held, it.elements * ITEM_BYTES[dtype] / on.memory_rate) + on.kernel


def _filled(it: Product, rows: int, columns: int, sms: int) -> float:
    """The part of the multiprocessors' time that makes elements of the result, and not padding
    or nothing.
    """
    tiles = it.batch * -(-it.m // rows) * -(-it.n // columns)
    useful = it.batch * it.m * it.n / (rows * columns)
    return useful / (-(-tiles // sms) * sms)


def _attention(it: Scores, dtype: str, on: Hardware) -> float:
    kernels = [ATTENTION.name]  # what `scalec calibrate` measured, before what others published
    if dtype in PUBLISHED:
        kernels.append(on.torch_attention if it.torch_picks else FLASH)
    for kernel in kernels:
        rate = on.measured.attention_rate(kernel, it.width, it.length, backward=it.backward)
        if rate is not None:
            return it.operations / rate
    narrow = min(1.0, it.width / WIDTH) ** NARROW
    return (
        it.operations
        / (on.peak_rate(dtype) * on.attention * narrow * it.length / (it.length + LENGTH))
        + on.kernel
    )


def of_message(program: Program, message: Message, on: Hardware, elements: Size) -> Size:
    """Seconds of a message with `elements` elements as its input, from when all ranks of its group
    have begun.

    Groups over the same axes send at the same time, and share a node's adapters.
    """
    ranks = len(message.among) or program.degree(message.axes)
    near = smaller(near_ranks(program, message.axes, on.ranks_per_node), ranks)
    if message.among:
        near = 1 if crosses(program, message.axes, on.ranks_per_node, message.among) else ranks
    away = near < ranks  # in all these sums a bool counts as 0 or 1
    size = elements * ITEM_BYTES[message.dtype]
    own, latency = (
        on.network / on.ranks_per_node,
        away * on.network_latency + (1 - away) * on.link_latency,
    )
    if message.op == "rotate":
        hop = _measured("send", size, 2, 2 - away, on)
        hop = size / (away * own + (1 - away) * on.link) + latency if hop is None else hop
        return larger(1, message.hops) * (ranks > 1) * hop
    whole = size * (ranks if message.op == "all_gather" else 1)
    if (known := _measured(message.op, whole, ranks, near, on)) is not None:
        return known
    if message.op == "all_to_all":
        across, within = whole * (ranks - near) / ranks / own, whole * (near - 1) / ranks / on.link
        return larger(across, within) + (ranks > 1) * latency
    group = Group(ranks, near, on.link, own, on.link_latency, on.network_latency)
    return get_collective_seconds(message.op, whole, group)


def _measured(op: str, whole: Size, ranks: Size, near: Size, on: Hardware) -> float | None:
    """Seconds of a collective by measured ones of groups of its size, or of a message by those
    of two ranks.
    """
    if not isinstance(ranks, int) or not isinstance(near, int):
        return None
    return on.measured.collective(op, ranks, -(-ranks // near), whole)


def near_ranks(program: Program, axes: tuple[str, ...], ranks_per_node: Size) -> Size:
    """The number of ranks of a group over `axes` that share a node; ranks count the mesh's last
    axis innermost.
    """
    near, stride = 1, 1
    for axis in reversed(program.axes):
        if axis.name in axes:
            near *= larger(1, smaller(axis.size, -(-ranks_per_node // stride)))
        stride *= axis.size
    return near
