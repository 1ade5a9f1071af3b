"""Seconds of work on a GPU, and of a collective over its links.

The formulas use data sheets.  Products go by the peak that is held, by how many tiles fill the
GPU's multiprocessors and by how long their sums are; attention goes by its length and width; other
ops go by bytes.
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
"""Rows and columns of a product that a multiprocessor makes at a time: it takes the best of these.
"""

SHORT = 64
"""Products with sums of this length run at half the rate of long ones."""

LENGTH, WIDTH, NARROW = 370, 128, 0.17
"""Attention of `LENGTH` positions runs at half the rate of long ones.  Below a width of `WIDTH` the
rate falls with the power `NARROW` of the width.
"""

PUBLISHED = ("bf16", "f16")
"""The element types that published kernels for attention were timed with; a GPU's file has them."""


def get_work_seconds(op: str, work: Work, on: Hardware) -> dict[str, float]:
    """Seconds by kind: `products`, `attention`, `memory-bound`; none where nothing is done.

    `op` is the name that measured seconds of memory-bound ops go by (`get_measured_name`).
    """
    seconds = dict[str, float]()
    if work.products:
        seconds["products"] = sum(_product(product, work.dtype, on) for product in work.products)
    if work.scores:
        seconds["attention"] = _attention(work.scores, work.dtype, on)
    if work.bytes:
        measured = on.measured.seconds_of(op, work.bytes)
        if measured is None:
            measured = max(work.bytes / on.memory_rate, on.kernel * work.kernels)
        seconds["memory-bound"] = measured
    return seconds


def get_measured_name(op: Op) -> str:
    """The name of an op among measured ones: its kind; for a gradient also its op's kind and the
    operands.
    """
    if op.kind != VJP:
        return op.kind
    return " ".join((op.kind, str(op.get("of")), *op.names("wrt")))


def _product(product: Product, dtype: str, on: Hardware) -> float:
    m, n, k = product.m, product.n, product.k
    measured = on.measured.product(dtype, m, n, k, product.batch)
    if measured is not None:
        return measured
    filled = max(_get_filled_part(product, *tile, on.sms) for tile in TILES)
    rate = on.product_rate(dtype) * filled * k / (k + SHORT)
    moving = product.elements * ITEM_BYTES[dtype] / on.memory_rate
    return max(product.operations / rate, moving) + on.kernel


def _get_filled_part(product: Product, rows: int, columns: int, sms: int) -> float:
    """The part of the multiprocessors' time that makes elements of the result, and not padding
    or nothing.
    """
    tiles = product.batch * -(-product.m // rows) * -(-product.n // columns)
    useful = product.batch * product.m * product.n / (rows * columns)
    return useful / (-(-tiles // sms) * sms)


def _attention(scores: Scores, dtype: str, on: Hardware) -> float:
    kernels = [ATTENTION.name]  # what `scalec calibrate` measured, before what others published
    if dtype in PUBLISHED:
        kernels.append(on.torch_attention if scores.torch_picks else FLASH)
    for kernel in kernels:
        rate = on.measured.attention_rate(
            kernel, scores.width, scores.length, backward=scores.backward
        )
        if rate is not None:
            return scores.operations / rate
    narrow = min(1.0, scores.width / WIDTH) ** NARROW
    length = scores.length
    rate = on.peak_rate(dtype) * on.attention * narrow * length / (length + LENGTH)
    return scores.operations / rate + on.kernel


def get_message_seconds(program: Program, message: Message, on: Hardware, elements: Size) -> Size:
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
    network = on.network / on.ranks_per_node
    latency = away * on.network_latency + (1 - away) * on.link_latency
    if message.op == "rotate":
        hop = _get_measured_seconds("send", size, 2, 2 - away, on)
        if hop is None:
            hop = size / (away * network + (1 - away) * on.link) + latency
        return larger(1, message.hops) * (ranks > 1) * hop
    whole = size
    if message.op == "all_gather":
        whole = size * ranks
    measured = _get_measured_seconds(message.op, whole, ranks, near, on)
    if measured is not None:
        return measured
    if message.op == "all_to_all":
        across = whole * (ranks - near) / ranks / network
        within = whole * (near - 1) / ranks / on.link
        return larger(across, within) + (ranks > 1) * latency
    group = Group(ranks, near, on.link, network, on.link_latency, on.network_latency)
    return get_collective_seconds(message.op, whole, group)


def _get_measured_seconds(
    op: str, whole: Size, ranks: Size, near: Size, on: Hardware
) -> float | None:
    """Seconds of a collective by measurements of groups of its size, or of a message by
    measurements of two ranks.
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
