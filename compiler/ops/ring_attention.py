"""Attention over a sequence whose keys and values pass from rank to rank (Ring Attention, Liu et
al. 2023).

Each rank has the queries, keys and values of its own part of the sequence.  At each hop it attends
to the keys that it has, and sends them on; results are merged by their log-sum-exp.  Backward sends
keys around a second time, with their gradients, and the gradients one hop further: to the ranks
that have the keys.
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
from .call import Argument, Call, Group
from .messages import Message
from .protocol import Attribute, TypingError, wide
from .saved_tensors import Local, Saved
from .work import Work

RING = "ring"
"""The attribute with the axis that keys go around, and the word of claims that ask for it."""


def around_ring(op: Op, axis: str) -> Op:
    """Attention whose keys go around this axis."""
    return evolve(op, kind=RING_ATTENTION.name, attrs=(*op.attrs, (RING, (axis,))))


def _infer(program: Program, types: Sequence[Type], op: Op) -> Sequence[Type]:
    """The types of attention; once values are placed, the ring's axis alone shards the sequence."""
    are_placed = any(type.places for type in types)
    for type in types[:3] if are_placed else ():
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


def ring_hops(local: Local) -> int:
    """How often each rank sends keys on."""
    (axis,) = local.op.names(RING)
    zigzag = bool(local.program.zigzag_axes(SEQUENCE, (axis,)))
    ranks, causal = local.program.axis(axis).size, dict(local.op.attrs)["mask"] == "causal"
    return hops(ranks, local.program.size(SEQUENCE), window_of(local.op), causal, zigzag)


def _rotate(local: Local, what: str, dtype: str, count: int = 0, by: int = 1) -> Message:
    """Keys and values, or their gradients, as one flat buffer."""
    return Message(
        "rotate",
        what,
        local.op.names(RING),
        dtype,
        (local.elements(1) + local.elements(2),),
        hops=count,
        by=by,
    )


def _forward(local: Local) -> tuple[Message, ...]:
    count = ring_hops(local)
    return (_rotate(local, local.op.outputs[0].name, local.types[1].dtype, count),) if count else ()


def _backward(local: Local) -> tuple[Message, ...]:
    """Keys and their gradients alternate; then the gradients alone go to the ranks that have their
    keys.
    """
    ranks, count = local.program.degree(local.op.names(RING)), ring_hops(local)
    if not count:
        return ()
    q, k = local.op.outputs[0].name, local.op.outputs[1].name
    dtype = local.types[1].dtype
    back = 1 if count == ranks - 1 else -count
    return (
        _rotate(local, q, dtype, count),
        _rotate(local, k, wide(dtype), count),
        _rotate(local, k, wide(dtype), by=back),
    )


def _saves(local: Local) -> Saved:
    """Queries, keys and values of this rank, the result, and a number for each of its rows."""
    lse = ("logsumexp", query_rows(local) * local.wide)
    return Saved(operands=tuple(range(len(local.types))), results=(0,), others=(lse,))


def _workspace(local: Local, back: bool = False) -> int:
    """Two buffers of keys and values, sums of results or gradients, and the call that takes most.

    Backward has one buffer of gradients on the first hop, then three: one that it adds to, one that
    it sends and one that it receives.
    """
    part, attrs = local.program.local_size(local.types[0], SEQUENCE), dict(local.op.attrs)
    keys = local.bytes(1) + local.bytes(2)
    first_call = _of_call(local, back, part, part)
    if not back:
        sums = result_elements(local) * (local.wide - local.item)
        return 2 * keys + sums + first_call
    gradients = local.wide_bytes(1) + local.wide_bytes(2)
    later_sizes = [(part, part)]
    if (
        local.program.zigzag_axes(SEQUENCE, local.op.names(RING))
        and attrs["mask"] == "causal"
        and not window_of(local.op)
    ):
        # a rank has two chunks: later hops are of all queries and half of the keys, or the reverse
        later_sizes = [(part, part // 2), (part // 2, part)]
    later_calls = max(_of_call(local, back, *sizes) for sizes in later_sizes)
    sums = local.wide_bytes() - local.bytes() + gradients - keys
    return 2 * keys + sums + max(2 * gradients + later_calls, first_call)


def _of_call(local: Local, back: bool, queries: int, keys: int) -> int:
    """The results of some queries and keys, float32 at least, and what a call holds besides.

    torch's flash attention for CPUs is given copies in float32 of operands in fewer bits.
    """
    part = local.program.local_size(local.types[0], SEQUENCE)
    of_q = local.wide_bytes() * queries // part
    of_k = (local.wide_bytes(1) + local.wide_bytes(2)) * keys // part
    of_result = result_elements(local) * local.wide * queries // part
    sums = of_q + of_k if back else of_result
    if is_special(local) or (local.device == "cuda" and not local.is_narrow):
        if local.runs_kernel:
            return sums
        return sums + scores_of_some(local, back, max(queries, keys))
    copies = 0
    if local.is_narrow and local.device == "cpu":
        copies = of_q + of_k + 2 * back * of_result
    return sums + copies + flash_workspace(local, back, queries, keys)


def _ring_work(local: Local, backward: bool = False) -> Work:
    """The work of attention in parts, whose results are merged: sums are read and written, and
    parts read, hop by hop.

    Forward a part is multiplied into the sum; backward three gradients are added up, the gradients
    of keys and values with what comes.
    """
    work, blocks = attention_work(local, backward), ring_hops(local) + 1
    assert work.scores, "ring attention: no scores"
    part = local.program.local_size(local.types[0], SEQUENCE)
    own_pairs = seen_pairs(part, local.op.get("mask") == "causal", window_of(local.op))
    if backward:
        merged = 3 * (local.elements() + 2 * (local.elements(1) + local.elements(2)))
    else:
        merged = 5 * result_elements(local)
    # it calls FlashAttention-2
    scores = evolve(work.scores, length=part, own_pairs=own_pairs, torch_picks=False)
    return evolve(work, scores=scores, bytes=blocks * merged * local.wide, kernels=6 * blocks)


def _call(local: Local) -> Call:
    """The call of attention, with the axis and its layout, which say the positions of ranks."""
    axes = local.op.names(RING)
    options: dict[str, Argument] = {}
    for name, argument in attention_call(local).options.items():
        if name not in (RING, "positions"):
            options[name] = argument
    if local.program.zigzag_axes(SEQUENCE, axes):
        options["zigzag"] = True
    return Call((Group(axes),), options)


_UNUSED = ("dropout", "site")
"""Attributes of attention that ring attention does not have."""

RING_ATTENTION = evolve(
    ATTENTION,
    name="ring_attention",
    doc="attention, of which each rank of `ring` has a part of the queries, keys and values: the"
    " keys go around.",
    attributes=(
        *(attribute for attribute in ATTENTION.attributes if attribute.name not in _UNUSED),
        Attribute(RING, kinds=(tuple,), implied=True),
    ),
    typing=_infer,
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
