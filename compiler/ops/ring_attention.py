"""Attention over a sequence whose keys and values pass from rank to rank (Ring Attention, Liu et
al. 2023).

Each rank has the queries, keys and values of its own part of the sequence.  At each hop it attends
to the keys that it has, and sends them on; results are merged by their log-sum-exp.  Backward sends
keys around a second time, with their gradients, and these one hop further, to the ranks whose keys
they are of.
"""

from collections.abc import Sequence
from functools import partial

from attrs import evolve

from ..ir import SEQUENCE, Op, Program, Type
from .attention import (
    ATTENTION,
    attention_call,
    attention_roles,
    attention_work,
    documents_whole,
    flash_workspace,
    is_special,
    query_rows,
    result_elements,
    scores_of_some,
    seen_pairs,
    window_of,
)
from .call import Call, Group
from .messages import Message
from .protocol import Attribute, TypingError, wide
from .saved_tensors import Local, Saved
from .work import Work

RING = "ring"
"""The attribute with the axis that keys go around, and the word of claims that ask for it."""


def around_ring(op: Op, axis: str) -> Op:
    """Attention whose keys go around this axis."""
    return evolve(op, kind=RING_ATTENTION.name, attrs=(*op.attrs, (RING, (axis,))))


def _typed(program: Program, types: Sequence[Type], op: Op) -> Sequence[Type]:
    """As attention of a sequence that the ring's axis alone shards, once values are placed."""
    placed = any(type.places for type in types)
    for type in types[:3] if placed else ():
        if type.axes_of(SEQUENCE) != op.names(RING):
            raise TypingError(
                f"{op.kind} takes `{SEQUENCE}` over {', '.join(op.names(RING))} alone"
            )
    return evolve(RING_ATTENTION, typing=None).infer(program, types, op)


def hops(ranks: int, positions: int, window: int, causal: bool, zigzag: bool) -> int:
    """How often keys are sent on: until the rank furthest behind that some query sees has been
    heard of.
    """
    if window != 1 and (not window or not causal or zigzag):
        return ranks - 1
    return min(ranks - 1, -(-(window - 1) * ranks // positions))


def ring_hops(it: Local) -> int:
    """How often each rank sends keys on."""
    (axis,) = it.op.names(RING)
    zigzag = bool(it.program.zigzag_axes(SEQUENCE, (axis,)))
    ranks, causal = it.program.axis(axis).size, dict(it.op.attrs)["mask"] == "causal"
    return hops(ranks, it.program.size(SEQUENCE), window_of(it.op), causal, zigzag)


def _rotate(it: Local, what: str, dtype: str, count: int = 0, by: int = 1) -> Message:
    """Keys and values, or their gradients, as one flat buffer."""
    return Message(
        "rotate",
        what,
        it.op.names(RING),
        dtype,
        (it.elements(1) + it.elements(2),),
        hops=count,
        by=by,
    )


def _forward(it: Local) -> tuple[Message, ...]:
    count = ring_hops(it)
    return (_rotate(it, it.op.outputs[0].name, it.types[1].dtype, count),) if count else ()


def _backward(it: Local) -> tuple[Message, ...]:
    """Keys and their gradients alternate; then the gradients alone go to the ranks whose keys
    they are of.
    """
    ranks, count = it.program.degree(it.op.names(RING)), ring_hops(it)
    q, k, _ = (value.name for value in it.op.outputs)
    back = 1 if count == ranks - 1 else -count
    rotations = (
        _rotate(it, q, it.types[1].dtype, count),
        _rotate(it, k, wide(it.types[1].dtype), count),
    )
    return (*rotations, _rotate(it, k, wide(it.types[1].dtype), by=back)) if count else ()


def _saves(it: Local) -> Saved:
    """Queries, keys and values of this rank, the result, and a number for each of its rows."""
    lse = ("logsumexp", query_rows(it) * it.wide)
    return Saved(operands=tuple(range(len(it.types))), results=(0,), others=(lse,))


def _workspace(it: Local, back: bool = False) -> int:
    """Two buffers of keys and values, sums of results or gradients, and the call that takes most.

    Backward has one buffer of gradients on the first hop, then three: those that it adds to, sends
    and receives.
    """
    part, attrs = it.program.local_size(it.types[0], SEQUENCE), dict(it.op.attrs)
    keys, gradients = (of(1) + of(2) for of in (it.bytes, it.widened))
    if not back:
        return 2 * keys + result_elements(it) * (it.wide - it.item) + _of_call(it, back, part, part)
    zigzag = (
        it.program.zigzag_axes(SEQUENCE, it.op.names(RING))
        and attrs["mask"] == "causal"
        and not window_of(it.op)
    )
    later = ((part, part // 2), (part // 2, part)) if zigzag else ((part, part),)
    most = max(2 * gradients + _of_call(it, back, *sizes) for sizes in later)
    sums = it.widened() - it.bytes() + gradients - keys
    return 2 * keys + sums + max(most, _of_call(it, back, part, part))


def _of_call(it: Local, back: bool, queries: int, keys: int) -> int:
    """The results of some queries and keys, float32 at least, and what a call holds besides.

    torch's flash attention for CPUs is given copies in float32 of what is narrower.
    """
    part = it.program.local_size(it.types[0], SEQUENCE)
    of_q, of_result = (
        it.widened() * queries // part,
        result_elements(it) * it.wide * queries // part,
    )
    of_k = (it.widened(1) + it.widened(2)) * keys // part
    made = of_q + of_k if back else of_result
    if is_special(it) or (it.device == "cuda" and not it.is_narrow):
        return made + (0 if it.launched else scores_of_some(it, back, max(queries, keys)))
    copies = of_q + of_k + 2 * back * of_result if it.is_narrow and it.device == "cpu" else 0
    return made + copies + flash_workspace(it, back, queries, keys)


def _ring_work(it: Local, backward: bool = False) -> Work:
    """That of attention in parts, whose results are merged: sums are read and written, and parts
    read, hop by hop.

    Forward a part is multiplied into the sum; backward three gradients are added up, those of keys
    with what comes.
    """
    work, blocks = attention_work(it, backward), ring_hops(it) + 1
    assert work.scores, "ring attention: no scores"
    part, keys = it.program.local_size(it.types[0], SEQUENCE), it.elements(1) + it.elements(2)
    own = seen_pairs(part, it.op.get("mask") == "causal", window_of(it.op))
    merged = 3 * (it.elements() + 2 * keys) if backward else 5 * result_elements(it)
    # it calls FlashAttention-2
    scores = evolve(work.scores, length=part, own=own, torch_picks=False)
    return evolve(work, scores=scores, bytes=blocks * merged * it.wide, kernels=6 * blocks)


def _call(it: Local) -> Call:
    """As attention's, with the axis and its layout, from which the positions of ranks follow."""
    axes, told = it.op.names(RING), (RING, "positions")
    options = {key: said for key, said in attention_call(it).options.items() if key not in told}
    return Call(
        (Group(axes),),
        options | ({"zigzag": True} if it.program.zigzag_axes(SEQUENCE, axes) else {}),
    )


RING_ATTENTION = evolve(
    ATTENTION,
    name="ring_attention",
    doc="attention, of which each rank of `ring` has a part of the queries, keys and values: the"
    " keys go around.",
    attributes=(
        *(each for each in ATTENTION.attributes if each.name not in ("dropout", "site")),
        Attribute(RING, kinds=(tuple,), implied=True),
    ),
    typing=_typed,
    whole_operands=documents_whole,
    vjp=evolve(
        ATTENTION.vjp,
        workspace=partial(_workspace, back=True),
        work=partial(_ring_work, backward=True),
        communicates=_backward,
    ),
    communicates=_forward,
    function="ring_attention",
    torch="ring_attention",
    call=_call,
    saves=_saves,
    workspace=_workspace,
    work=_ring_work,
    roles=attention_roles,
    user_visible=False,
    plan_name=ATTENTION.name,
)
