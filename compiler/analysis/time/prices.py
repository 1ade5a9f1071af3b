"""Prices of a program's ops: a rank's computation, by kind, and its messages.

Non-goals: when ops begin (`timeline`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod

from attrs import evolve, frozen

from ...ir import BATCH, ITEM_BYTES, Op, Program, Type
from ...ops import OPS, Message, messages
from ...ops.saved_tensors import Local
from ...ops.vjp import KIND as VJP
from ...ops.work import Work
from ..hardware import Hardware
from .seconds import get_measured_name, get_message_seconds, get_work_seconds

EXPOSED = "exposed: "
"""The beginning of the name of a kind of time when the GPU waits for collectives; their axes
follow.
"""


Sent = tuple[tuple[str, ...], float]
"""The axes of a group of ranks, and seconds of its collective."""


@frozen
class Price:
    """An op: what it sends, by axes and seconds; whom the GPU then waits for; what it computes, by
    kind.

    sends   of a ring one hop of its keys and values; in backward also one hop of their gradients,
            and the last such hop
    blocks  how many blocks of keys a ring brings one after the other, its own first; 1 of all other
            ops
    own     the part of what it computes that is done with its own block
    layers  the dims of the layers whose flat buffers it takes as a stack, and sends one by one
    bucket  whose flat buffer it takes, "" for none
    line    of the plan
    counts  whether the host waits for what it computes, the counts of experts' rows
    """

    sends: tuple[Sent, ...]
    waiting: str
    computes: tuple[tuple[str, float], ...]
    kernels: int
    reduces: bool
    gathers: bool
    layers: tuple[str, ...]
    bucket: str
    line: str
    blocks: int = 1
    own_part: float = 1.0
    counts: bool = False

    @property
    def sending(self) -> str:
        """The kind of its collectives."""
        if self.reduces:
            return "reduction"
        if self.gathers:
            return "gather"
        return "exchange"


Prices = Callable[[Op], Price]


def prices(program: Program, on: Hardware, types: Mapping[str, Type] | None = None) -> Prices:
    """The prices of a program's ops, each made once; `types` are the types of all values."""
    prices_by_id, types = dict[int, Price](), types or program.types

    def price_of(op: Op) -> Price:
        price = prices_by_id.get(id(op))
        if price is None:
            price = prices_by_id[id(op)] = _price(program, op, on, types)
        return price

    return price_of


def _price(program: Program, op: Op, on: Hardware, types: Mapping[str, Type]) -> Price:
    operands = tuple(types[name] for name in op.inputs)
    sent = messages(program, op, types)
    bucket = program.bucket_of(operands[0]) if operands else None
    layers = operands[0].dims[:-1] if bucket else ()
    sends = list[Sent]()
    for message in sent:
        seconds = _seconds(program, message, op, on, message.shape[len(layers) :])
        sends.append((message.axes, seconds))
    axes = dict.fromkeys(chain.from_iterable(message.axes for message in sent))
    computes, kernels = dict[str, float](), 0
    own_part = 1.0
    if work := work_of(program, op, operands):
        computes |= get_work_seconds(get_measured_name(op), work, on)
        kernels += work.kernels
        if work.scores and work.scores.own_pairs:
            own_part = work.scores.own_pairs / work.scores.pairs
    if sums := sums_of(program, op, operands):
        seconds = get_work_seconds(ACCUMULATE, sums, on)["memory-bound"]
        computes["memory-bound"] = computes.get("memory-bound", 0.0) + seconds
        kernels += sums.kernels
    return Price(
        tuple(sends),
        waiting=EXPOSED + " × ".join(axes),
        computes=tuple(computes.items()),
        kernels=kernels,
        reduces=any(map(_adds_up, sent)),
        gathers=any(message.op == "all_gather" for message in sent),
        layers=layers,
        bucket=bucket.name if bucket else "",
        line=str(op.span),
        blocks=max((message.hops for message in sent), default=0) + 1,
        own_part=own_part,
        counts=OPS[op.kind].waits_on_host(program, op),
    )


def _adds_up(message: Message) -> bool:
    return message.op in ("all_reduce", "reduce_scatter") and not message.maximum


MASTER = ITEM_BYTES["f32"]
"""The least bytes of an element of a sum of gradients."""


def work_of(program: Program, op: Op, types: Sequence[Type]) -> Work | None:
    """The work of an op whose operands have these types; None where it only gives its operand
    another shape.

    None too for a cast of gradients to the type of their sums: gradients are added up as they are
    (`sums_of`).
    """
    entry = OPS[op.kind]
    # a cast of the step's own, not of the model, that widens a gradient
    is_of_step = op.kind == "cast" and op.span == program.region.span and BATCH not in types[0].dims
    if is_of_step and ITEM_BYTES[op.outputs[0].type.dtype] > ITEM_BYTES[types[0].dtype]:
        return None
    if entry.views(program, op):
        return None
    return entry.work(Local(program, op, tuple(types), (True,) * len(types), "cuda"))


ACCUMULATE = "accumulate"
"""The name of adding up gradients among measured ops."""


def sums_of(program: Program, op: Op, types: Sequence[Type]) -> Work | None:
    """The work of adding gradients of weights to the gradients of earlier microbatches, where an op
    makes any.

    It reads a gradient, and reads and writes a sum of the element type of masters.
    """
    if op.kind != VJP and not OPS[op.kind].may_delay(op):
        return None
    if any(BATCH in value.type.dims for value in op.outputs):
        return None  # gradients of activations
    if not any(BATCH in type.dims for type in types):
        return None
    size = 0
    for value in op.outputs:
        item = ITEM_BYTES[value.type.dtype]
        size += program.elements(value.type) * (item + 2 * max(item, MASTER))
    return Work(bytes=size, kernels=len(op.outputs))


def _seconds(
    program: Program, message: Message, op: Op, on: Hardware, shape: Sequence[int]
) -> float:
    """Seconds of one hop of a message; ragged rows take as long as the larger of what goes and
    what comes.
    """
    elements = prod(shape)
    if message.ragged:
        elements = max(elements, program.elements(op.outputs[0].type))
    return get_message_seconds(program, evolve(message, hops=0), on, elements)
