"""Prices of a program's ops: a rank's computation, by kind, and its messages.

Non-goals: when ops begin (`timeline`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod

from attrs import evolve, frozen

from ...ir import BATCH, ITEM_BYTES, Op, Program, Type
from ...ops import OPS, Message, messages
from ...ops.experts import GROUPED, is_counted_on_host
from ...ops.saved_tensors import Local
from ...ops.vjp import KIND as VJP
from ...ops.work import Work
from ..hardware import Hardware
from .seconds import measured_as, of_message, of_work

EXPOSED = "exposed: "
"""Before the axes of collectives, the kind of time in which the GPU waits for them."""


Sent = tuple[tuple[str, ...], float]
"""The axes of a group of ranks, and seconds of its collective."""


@frozen
class Price:
    """An op: what it sends, by axes and seconds; whom the GPU then waits for; what it computes, by
    kind.

    sends   of a ring one hop of its keys and values, and backward one of their gradients, and the
            last of these
    blocks  how many keys a ring brings one after the other, its own first; 1 of all other ops
    own     the part of what it computes that is done with the first of them
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
    own: float = 1.0
    counts: bool = False

    @property
    def sending(self) -> str:
        """The kind of its collectives."""
        return "reduction" if self.reduces else "gather" if self.gathers else "exchange"


Prices = Callable[[Op], Price]


def prices(program: Program, on: Hardware, types: Mapping[str, Type] | None = None) -> Prices:
    """The prices of a program's ops, each made once; `types` are those of all values."""
    known, types = dict[int, Price](), types or program.types

    def of(op: Op) -> Price:
        if (found := known.get(id(op))) is None:
            found = known[id(op)] = _price(program, op, on, types)
        return found

    return of


def _price(program: Program, op: Op, on: Hardware, types: Mapping[str, Type]) -> Price:
    own = tuple(types[name] for name in op.inputs)
    bucket, sent = program.bucket_of(own[0]) if own else None, messages(program, op, types)
    layers = own[0].dims[:-1] if bucket else ()
    sends = tuple((it.axes, _seconds(program, it, op, on, it.shape[len(layers) :])) for it in sent)
    axes = dict.fromkeys(chain.from_iterable(it.axes for it in sent))
    work = work_of(program, op, own)
    sums = sums_of(program, op, own)
    computes = of_work(measured_as(op), work, on) if work else {}
    if sums:
        computes["memory-bound"] = (
            computes.get("memory-bound", 0.0) + of_work(ACCUMULATE, sums, on)["memory-bound"]
        )
    return Price(
        sends,
        EXPOSED + " × ".join(axes),
        tuple(computes.items()),
        (work.kernels if work else 0) + (sums.kernels if sums else 0),
        any(it.op in ("all_reduce", "reduce_scatter") and not it.maximum for it in sent),
        any(it.op == "all_gather" for it in sent),
        layers,
        bucket.name if bucket else "",
        str(op.span),
        max((it.hops for it in sent), default=0) + 1,
        work.scores.own / work.scores.pairs if work and work.scores and work.scores.own else 1.0,
        is_counted_on_host(program, op),
    )


MASTER = ITEM_BYTES["f32"]
"""The least bytes of an element of a sum of gradients."""


def work_of(program: Program, op: Op, types: Sequence[Type]) -> Work | None:
    """The work of an op whose operands have these types; None where it only gives its operand
    another shape.

    None of a cast of gradients to the type of their sums, too: these are added up as they are
    (`sums_of`).
    """
    entry = OPS[op.kind]
    # a cast of the step's own, not of the model, that widens a gradient
    is_of_step = op.kind == "cast" and op.span == program.region.span and BATCH not in types[0].dims
    if is_of_step and ITEM_BYTES[op.outputs[0].type.dtype] > ITEM_BYTES[types[0].dtype]:
        return None
    known = Local(program, op, tuple(types), (True,) * len(types), "cuda")
    return None if entry.views(program, op) else entry.work(known)


ACCUMULATE = "accumulate"
"""The name of adding up gradients among measured ops."""


def sums_of(program: Program, op: Op, types: Sequence[Type]) -> Work | None:
    """The work of adding gradients of weights to those of earlier microbatches, where an op makes
    any.

    It reads a gradient, and reads and writes a sum of the element type of masters.
    """
    made = [value.type for value in op.outputs]
    of_weights = op.kind in (VJP, "contract", GROUPED.name) and not any(
        BATCH in type.dims for type in made
    )
    if not of_weights or not any(BATCH in type.dims for type in types):
        return None
    items = (ITEM_BYTES[type.dtype] for type in made)
    each = (
        program.elements(type) * (item + 2 * max(item, MASTER))
        for type, item in zip(made, items, strict=True)
    )
    return Work(bytes=sum(each), kernels=len(made))


def _seconds(program: Program, it: Message, op: Op, on: Hardware, shape: Sequence[int]) -> float:
    """Seconds of one hop of a message; ragged rows take as long as the larger of what goes and
    what comes.
    """
    came = program.elements(op.outputs[0].type) if it.ragged else 0
    return of_message(program, evolve(it, hops=0), on, max(prod(shape), came))
