"""Prices of a program's ops: a rank's computation, by kind, and its messages.

Sizes of dims and axes may be numpy arrays, one number for each of many programs of one structure: all of them are
priced at once (`stacked`), and walked one by one.  Non-goals: when ops begin (`timeline`).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

from attrs import evolve, frozen

from ...ir import BATCH, ITEM_BYTES, Op, Program, Type
from ...ops import OPS, Message, messages
from ...ops.experts import GROUPED
from ...ops.saved_tensors import Local
from ...ops.vjp import KIND as VJP
from ...ops.work import Work
from ..hardware import Hardware
from .seconds import Size, larger, measured_as, of_message, of_work

EXPOSED = "exposed: "
"""Before the axes of collectives, the kind of time in which the GPU waits for them."""


Sent = tuple[tuple[str, ...], Size]
"""The axes of a group of ranks, and seconds of its collective."""


@frozen
class Price:
    """An op: what it sends, by axes and seconds; whom the GPU then waits for; what it computes, by kind.

    sends   of a ring one hop of its keys and values, and backward one of their gradients, and the last of these
    blocks  how many keys a ring brings one after the other, its own first; 1 of all other ops
    own     the part of what it computes that is done with the first of them
    layers  the dims of the layers whose flat buffers it takes as a stack, and sends one by one
    bucket  whose flat buffer it takes, "" for none
    line    of the plan
    """

    sends: tuple[Sent, ...]
    waiting: str
    computes: tuple[tuple[str, Size], ...]
    kernels: int
    reduces: bool
    gathers: bool
    layers: tuple[str, ...]
    bucket: str
    line: str
    blocks: Size = 1
    own: Size = 1.0

    @property
    def sending(self) -> str:
        """The kind of its collectives."""
        return "reduction" if self.reduces else "gather" if self.gathers else "exchange"

    def at(self, lane: int) -> "Price":
        """The price of one of many programs."""
        return evolve(
            self,
            sends=tuple((axes, _at(seconds, lane)) for axes, seconds in self.sends),
            computes=tuple((kind, _at(seconds, lane)) for kind, seconds in self.computes),
            kernels=_at(self.kernels, lane),
            blocks=_at(self.blocks, lane),
            own=_at(self.own, lane),
        )


def _at(size: Size, lane: int) -> Any:
    return size if isinstance(size, int | float) else size[lane].item()


Prices = Callable[[Op], Price]


def prices(program: Program, on: Hardware, types: Mapping[str, Type] | None = None) -> Prices:
    """The prices of a program's ops, each made once; `types` are those of all values."""
    of = types or program.types
    return _known(lambda op: _price(program, op, on, of))


def prices_of_all(programs: Sequence[Program], on: Hardware) -> list[Prices]:
    """The prices of the ops of programs that differ in sizes alone, made for all of them at once.

    An op whose rules ask something of sizes, as whether one is larger, is priced for one program after the other.
    """
    whole, types = stacked(programs), programs[0].types

    def together(op: Op) -> Price:
        try:
            return _price(whole, op, on, types)
        except (TypeError, ValueError):  # numpy's, of an array taken for one number
            return _joined([_price(program, op, on, types) for program in programs])

    of_all = _known(together)
    return [_known(lambda op, lane=lane: of_all(op).at(lane)) for lane in range(len(programs))]


def stacked(programs: Sequence[Program]) -> Program:
    """Programs that differ in sizes alone as one, whose sizes are arrays."""
    import numpy as np

    sizes = zip(*([dim.size for dim in it.dims] for it in programs), strict=True)
    degrees = zip(*([axis.size for axis in it.axes] for it in programs), strict=True)
    dims = (evolve(dim, size=np.array(size)) for dim, size in zip(programs[0].dims, sizes, strict=True))
    axes = (evolve(axis, size=np.array(degree)) for axis, degree in zip(programs[0].axes, degrees, strict=True))
    return evolve(programs[0], dims=tuple(dims), axes=tuple(axes))


def _known(price: Prices) -> Prices:
    """The same, each op once."""
    known = dict[int, Price]()

    def of(op: Op) -> Price:
        if (found := known.get(id(op))) is None:
            found = known[id(op)] = price(op)
        return found

    return of


def _joined(each: Sequence[Price]) -> Price:
    """The prices of an op in many programs as one."""
    import numpy as np

    first = each[0]
    sends = [np.array(seconds) for seconds in zip(*([s for _, s in it.sends] for it in each), strict=True)]
    computes = [np.array(seconds) for seconds in zip(*([s for _, s in it.computes] for it in each), strict=True)]
    return evolve(
        first,
        sends=tuple((axes, seconds) for (axes, _), seconds in zip(first.sends, sends, strict=True)),
        computes=tuple((kind, seconds) for (kind, _), seconds in zip(first.computes, computes, strict=True)),
        **{name: np.array([getattr(it, name) for it in each]) for name in ("kernels", "blocks", "own")},
    )


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
        computes["memory-bound"] = computes.get("memory-bound", 0.0) + of_work(ACCUMULATE, sums, on)["memory-bound"]
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
    )


MASTER = ITEM_BYTES["f32"]
"""The least bytes of an element of a sum of gradients."""


def work_of(program: Program, op: Op, types: Sequence[Type]) -> Work | None:
    """The work of an op whose operands have these types; None where it only gives its operand another shape.

    None of a cast of gradients to the type of their sums, too: these are added up as they are (`sums_of`).
    """
    entry = OPS[op.kind]
    if _is_of_sums(program, op, types):
        return None
    known = Local(program, op, tuple(types), (True,) * len(types), "cuda")
    return None if entry.views(program, op) else entry.work(known)


def _is_of_sums(program: Program, op: Op, types: Sequence[Type]) -> bool:
    """Whether it is a cast of the step's own, not of the model, that widens a gradient."""
    if op.kind != "cast" or op.span != program.region.span or BATCH in types[0].dims:
        return False
    return ITEM_BYTES[op.outputs[0].type.dtype] > ITEM_BYTES[types[0].dtype]


ACCUMULATE = "accumulate"
"""The name of adding up gradients among measured ops."""


def sums_of(program: Program, op: Op, types: Sequence[Type]) -> Work | None:
    """The work of adding gradients of weights to those of earlier microbatches, where an op makes any.

    It reads a gradient, and reads and writes a sum of the element type of masters.
    """
    made = [value.type for value in op.outputs]
    of_weights = op.kind in (VJP, "contract", GROUPED.name) and not any(BATCH in type.dims for type in made)
    if not of_weights or not any(BATCH in type.dims for type in types):
        return None
    items = (ITEM_BYTES[type.dtype] for type in made)
    each = (program.elements(type) * (item + 2 * max(item, MASTER)) for type, item in zip(made, items, strict=True))
    return Work(bytes=sum(each), kernels=len(made))


def _seconds(program: Program, it: Message, op: Op, on: Hardware, shape: Sequence[int]) -> Size:
    """Seconds of one hop of a message; ragged rows take as long as the larger of what goes and what comes."""
    came = program.elements(op.outputs[0].type) if it.ragged else 0
    return of_message(program, evolve(it, hops=0), on, larger(prod(shape), came))
