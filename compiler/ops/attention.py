"""Attention.

Queries may be those of a part of the sequence: each rank then has the keys, values and documents of
all of it.
"""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TypeVar

from attrs import evolve

from ..ir import BATCH, DATA_DIMS, SEQUENCE, Op, Placement, Type
from ..ir.splits import held
from .call import Argument, Call, Keyword, Positions, part_of
from .dropout import DRAWS, SITE, check_draws
from .protocol import DETERMINISTIC, Attribute, OpDef, Operand, Shape, TypingError, Vjp
from .reach import Reach
from .roles import Roles
from .saved_tensors import Local, Saved
from .work import Scores, Work

DOCUMENTS = Operand("documents", given="documents", optional=True)
"""Which document each token is of."""

LAST = (DOCUMENTS, evolve(DRAWS, optional=True))
"""The optional operands after an op's others; draws are given where it has `dropout`, and only
there.
"""

T = TypeVar("T")


def documents_and_draws(op: Op, rest: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The optional operands after an op's others: the documents and the draws, each one or none."""
    cut = len(rest) - ("dropout" in dict(op.attrs))
    return rest[:cut], rest[cut:]


def seen_pairs(size: int, causal: bool, window: int = 0) -> int:
    """How many pairs of a query and a key a mask lets through, in a sequence of `size`; a window of
    0 is none.

    Documents let fewer through: how long they are is known in a run alone, so this is the most.
    """
    width = min(window or size, size)
    # the query's own place is one of them
    before = width * (width + 1) // 2 + (size - width) * width
    return before if causal else 2 * before - size


def window_of(op: Op) -> int:
    """How near a key must be to be seen; 0 if any is."""
    return round(float(str(dict(op.attrs).get("window", 0))))


def head_dims(q: Type, k: Type) -> tuple[str, str]:
    """The dims that count query heads and key/value heads: each operand's one besides batch,
    sequence and the last.
    """
    return _heads(q), _heads(k)


def _heads(type: Type) -> str:
    found = [dim for dim in type.dims[:-1] if dim not in DATA_DIMS]
    if len(found) != 1 or SEQUENCE not in type.dims:
        raise TypingError(
            f"attention takes [batch, seq, heads, head_dim], not [{', '.join(type.dims)}]"
        )
    return found[0]


def attention_roles(types: Sequence[Type], op: Op) -> Roles:
    """The roles of an op whose first operands are queries and keys."""
    heads, kv_heads = head_dims(*types[:2])
    return Roles(query_seq=SEQUENCE, key_seq=SEQUENCE, heads=heads, kv_heads=kv_heads)


def _attended(types: Sequence[Type], op: Op) -> list[Shape]:
    q, k, v, *rest = types
    documents, draws = documents_and_draws(op, rest)
    heads, kv_heads = head_dims(q, k)
    if k.dims[:-1] != v.dims[:-1] or k.dims != tuple(
        kv_heads if dim == heads else dim for dim in q.dims
    ):
        raise TypingError(
            "attention needs queries, keys and values of the same dims but for the heads and"
            " the last of values"
        )
    if v.dims[-1] in q.dims[:-1]:
        raise TypingError(f"attention's result would have `{v.dims[-1]}` twice")
    if any(each.dims != tuple(dim for dim in q.dims[:-1] if dim != heads) for each in documents):
        raise TypingError(
            "attention needs documents of the same dims as queries but for the heads and the last"
        )
    if len(documents) > 1 or len(draws) != ("dropout" in dict(op.attrs)):
        raise TypingError("attention takes draws where it has dropout, and only there")
    for each in draws:
        check_draws(each, q)
    return [(q.dtype, (*q.dims[:-1], v.dims[-1]))]


def attention_reach(types: Sequence[Type], op: Op) -> dict[int, Reach]:
    """Keys and values within the window, those after the query only without a causal mask, of
    the query's document.
    """
    documents, _ = documents_and_draws(op, range(3, len(types)))
    nearest = (window_of(op) or inf) - 1
    after = 0 if op.get("mask") == "causal" else nearest
    return dict.fromkeys((1, 2), Reach(nearest, after, bool(documents)))


def documents_whole(types: Sequence[Type], op: Op) -> dict[int, frozenset[str]]:
    """Documents are those of the whole sequence."""
    documents, _ = documents_and_draws(op, range(3, len(types)))
    return dict.fromkeys(documents, frozenset((SEQUENCE,)))


def _heads_alike(types: Sequence[Type], op: Op, places: Sequence[Placement]) -> bool:
    """Key/value heads are sharded only together with the query heads that use them, over the
    outer of their axes.
    """
    q, k = types[:2]
    heads, kv_heads = head_dims(q, k)
    split = {place.dim for place in places} - {""}
    outer = q.axes_of(heads)[: len(k.axes_of(kv_heads))] == k.axes_of(kv_heads)
    return outer and (split == {heads, kv_heads} or (len(split) == 1 and split != {kv_heads}))


# ---- saved tensors: of torch's kernels, and all scores where torch has no kernel


def query_rows(it: Local) -> int:
    """The number of a rank's queries, of all heads and samples."""
    return it.elements() // it.program.size(it.types[0].dims[-1])


def result_elements(it: Local) -> int:
    """The number of elements of the result on a rank, whose last dim is that of values."""
    return query_rows(it) * it.program.size(it.types[2].dims[-1])


def _attention_saves(it: Local) -> Saved:
    """Flash attention where there is a kernel; with a cap or dropout all scores.  scalec's own
    needs no mask.
    """
    given = dict(it.op.attrs)
    if "dropout" in given or ("softcap" in given and not it.kernels):
        return _scores(it)
    by_torch = not (it.kernels and is_special(it))
    masks, padded = (_masks(it) * it.item, _padded(it)) if by_torch else (0, {})
    others = [("mask", masks)] * bool(masks) + [("logsumexp", query_rows(it) * it.wide)]
    others += [(f"{_NAMES[i]}, padded", size) for i, size in padded.items() if i < 3]
    operands = tuple(i for i in range(3) if i not in padded)
    if _chunks(it) > 1:
        of_chunks = ("result of each chunk", padded.get(3, result_elements(it) * it.item))
        return Saved(operands, others=(of_chunks, *others))
    if 3 in padded:
        return Saved(operands, others=((WIDER, padded[3]), *others))
    return Saved(operands, results=(0,), others=tuple(others))


WIDER = "result, padded"
"""The tensor out of which a narrower result is cut, which so is not in one piece."""

_NAMES = ("queries", "keys", "values")


def _padded(it: Local) -> dict[int, int]:
    """The bytes of those of q, k, v and the result, by number, that torch's attention for CPUs
    has with wider rows.
    """
    widths = [it.program.size(type.dims[-1]) for type in it.types[:3]]
    counts = [it.elements(i) // width for i, width in enumerate(widths)]
    sides = zip((*widths, widths[2]), (*counts, query_rows(it)), strict=True)
    widest = max(widths) if it.device == "cpu" else 0
    return {i: count * widest * it.item for i, (width, count) in enumerate(sides) if width < widest}


def _chunks(it: Local) -> int:
    """The number of parts of a rank's queries, each a call on the keys that it can see; 1 where
    any key can be seen.
    """
    q = it.types[0]
    matters = dict(it.op.attrs)["mask"] == "causal" or 0 < window_of(it.op) < it.program.size(
        SEQUENCE
    )
    return max(map(len, held(it.program, q, SEQUENCE))) if q.axes_of(SEQUENCE) and matters else 1


def _masks(it: Local) -> int:
    """The elements of the masks that torch's kernel is given for all chunks of a rank's queries, on
    the rank with most.

    A window or documents make one, and so do keys before the first query, which the kernel for CPUs
    does not know.
    """
    size, window, causal = (
        it.program.size(SEQUENCE),
        window_of(it.op),
        dict(it.op.attrs)["mask"] == "causal",
    )
    documents, _ = documents_and_draws(it.op, it.types[3:])
    window = window if window < size else 0
    if not it.types[0].axes_of(SEQUENCE):
        return _pairs(it) if window or documents else 0

    def of(start: int, stop: int) -> int:
        first = max(start + 1 - window, 0) if window else 0
        last = min(stop if causal else stop + window - 1, size) if causal or window else size
        masked = window or documents or (causal and start and it.device == "cpu")
        return (stop - start) * (last - first) if masked else 0

    samples = it.program.elements(documents[0]) // size if documents else 1
    return samples * max(
        sum(of(*run) for run in runs) for runs in held(it.program, it.types[0], SEQUENCE)
    )


def _scores(it: Local) -> Saved:
    """Keys and values repeated for each query head, their weights, and what these are made from."""
    q, given = it.types[0], dict(it.op.attrs)
    size, item = it.program.size(SEQUENCE), it.item
    scores = query_rows(it) * size
    values = result_elements(it) * item
    others = [
        ("keys of each head", it.bytes()),
        ("values of each head", values),
        ("softmax", scores * it.wide),
    ]
    others += [("seen", _pairs(it))]
    others += [("tanh", scores * it.wide)] if "softcap" in given else []
    others += [("weights", scores * item)] if "dropout" in given or item < it.wide else []
    rows = [
        n
        for dim, n in zip(q.dims, it.program.local_shape(q), strict=True)
        if dim not in (SEQUENCE, q.dims[-1])
    ]
    as_it_lies = q.dims.index(SEQUENCE) == 0 or 1 in rows or size == 1
    others += [] if as_it_lies else [("queries by head", it.bytes())]
    draws = (len(it.types) - 1,) if "dropout" in given else ()
    return Saved(operands=(*((0,) if as_it_lies else ()), *draws), others=tuple(others))


QUERIES = 256
"""The number of queries for which scalec's own attention in plain torch has scores at a time."""


def _attention_workspace(it: Local, back: bool = False) -> int:
    """The workspace of torch's attention, or of scalec's where torch has no kernel: its kernels
    need none.
    """
    given, size = dict(it.op.attrs), it.program.size(SEQUENCE)
    if not it.kernels or "dropout" in given or not is_special(it):
        queries = it.program.local_size(it.types[0], SEQUENCE) // _chunks(it)
        return _scores_twice(it) or flash_workspace(it, back, queries, size)
    if it.launched:
        return 0
    sums = sum(map(it.widened, range(3))) if back and it.is_narrow else 0
    return scores_of_some(it, back, size) + sums


def is_special(it: Local) -> bool:
    """Whether an op has a mask other than a causal one, or a soft cap: torch's flash attention
    knows neither.
    """
    return (
        "softcap" in dict(it.op.attrs)
        or 0 < window_of(it.op) < it.program.size(SEQUENCE)
        or len(it.types) > 3
    )


def _in_one_order(it: Local) -> bool:
    """Whether it is no kernel of torch's on GPUs, in whose backward blocks of keys add to dq as
    they come.
    """
    return bool({"softcap", "dropout"} & {*dict(it.op.attrs)}) or (it.kernels and is_special(it))


def scores_of_some(it: Local, back: bool, size: int) -> int:
    """The workspace where scores are computed for some queries at a time, with the results of the
    queries before.

    A call is of `size` queries and as many keys.
    """
    capped, window = "softcap" in dict(it.op.attrs), window_of(it.op)
    queries = min(size, QUERIES)
    keys = min(size, window + queries) if window else size
    before = min(size - queries, keys)
    now, left = (6, 1) if back else (3 + capped, 1 + capped)
    heads = query_rows(it) // it.program.local_size(it.types[0], SEQUENCE)
    return heads * queries * (now * keys + left * before) * it.wide


def _scores_twice(it: Local) -> int:
    """The workspace where all scores are in memory, two functions of them at a time."""
    if not {"softcap", "dropout"} & {*dict(it.op.attrs)}:
        return 0
    return 2 * query_rows(it) * it.program.size(SEQUENCE) * it.wide


MULTIPROCESSORS = 148
"""Multiprocessors of a B200; an H100 has 132.

In a deterministic backward those that share a head sum dq apart.
"""


def flash_workspace(it: Local, back: bool, queries: int, keys: int) -> int:
    """On CUDA, backward, the sums of dq in float32, a number for each of its rows, and dk and dv of
    each query head.

    As torch's copy of FlashAttention-2 allocates them
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: dq_accum, softmax_d,
    dk_expanded, dv_expanded), unmeasured; cuDNN's workspace is of that size.  On the CPU the scores
    that one thread has at a time, and backward their gradients, in float32, and in what is narrower
    once more; and a copy of the result's gradient unless it is [batch, seq, heads, d] without gaps
    (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    if it.device == "cpu":
        rows = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
        item = it.wide + it.is_narrow * it.item
        q, part = it.types[0], it.program.local_size(it.types[0], SEQUENCE)
        as_it_lies = it.program.local_size(q, BATCH) == 1 or (
            q.dims.index(SEQUENCE) == 1 and queries == part
        )
        copied = 0 if as_it_lies or not back else result_elements(it) * it.item * queries // part
        return (1 + back) * rows * min(keys, 512) * item + copied
    if not back or not it.is_narrow:
        return 0
    repeated = it.bytes() + result_elements(it) * it.item if it.elements(1) < it.elements() else 0
    rows = query_rows(it) // it.program.local_size(it.types[0], SEQUENCE)  # samples × heads
    sums = -(-MULTIPROCESSORS // rows) if DETERMINISTIC.name in dict(it.op.attrs) else 1
    return it.widened() * sums + query_rows(it) * it.wide + repeated


def _pairs(it: Local) -> int:
    """The elements of a mask: of a rank's queries and all keys, for each sample where there are
    documents.
    """
    documents, _ = documents_and_draws(it.op, it.types[3:])
    queries = it.program.local_size(it.types[0], SEQUENCE)
    return queries * (it.program.elements(documents[0]) if documents else it.program.size(SEQUENCE))


def attention_work(it: Local, backward: bool = False) -> Work:
    """The pairs of the rank that has most; all scores are made where they are saved."""
    q, size = it.types[0], it.program.size(SEQUENCE)
    causal, window = it.op.get("mask") == "causal", window_of(it.op)

    def pairs(start: int, stop: int) -> int:
        of_causal = seen_pairs(stop, True, window) - seen_pairs(start, True, window)
        return (
            of_causal
            if causal
            else 2 * of_causal - (stop - start)
            if window
            else (stop - start) * size
        )

    most = max(sum(pairs(*run) for run in runs) for runs in held(it.program, q, SEQUENCE))
    heads = query_rows(it) // it.program.local_size(q, SEQUENCE)
    width, value_width = it.program.size(q.dims[-1]), it.program.size(it.types[2].dims[-1])
    # of torch's kernels FlashAttention-2 alone can
    in_one_order = DETERMINISTIC.name in dict(it.op.attrs)
    torch_picks = not (is_special(it) or in_one_order)
    scores = Scores(heads, size, most, width, value_width, backward, torch_picks=torch_picks)
    return Work(q.dtype, scores=scores)


def attention_call(it: Local) -> Call:
    """The order of dims, what differs from causal attention, and where weights are dropped the
    ranks' heads.
    """
    q, attrs = it.types[0], dict(it.op.attrs)
    documents, draws = documents_and_draws(it.op, range(3, len(it.types)))
    heads = attention_roles(it.types, it.op).heads
    letters = {BATCH: "b", SEQUENCE: "s", heads: "h", q.dims[-1]: "d"}
    layout = "".join(letters[dim] for dim in q.dims)
    options: dict[str, Argument] = {"layout": layout} if layout != "bshd" else {}
    options |= {"causal": False} if attrs.pop("mask") == "full" else {}
    options |= {"window": window_of(it.op)} if attrs.pop("window", 0) else {}
    options |= attrs | {key: attrs[key] == "on" for key in {DETERMINISTIC.name} & {*attrs}}
    last = {"documents": documents, "draws": draws}
    options |= {name: Keyword(operands[0]) for name, operands in last.items() if operands}
    options |= {"heads": part_of(it, q, heads)} if draws and q.axes_of(heads) else {}
    parts = q.axes_of(SEQUENCE)
    return Call(options=options | ({"positions": Positions(SEQUENCE, parts)} if parts else {}))


def _at_least_0(value: float) -> bool:
    return value >= 0


ATTENTION = OpDef(
    "attention",
    "softmax(cap(q·kᵀ · scale) + mask)·v, where v may have a last dim of its own; query head i"
    " uses key/value head"
    " i // (heads / kv_heads) (Ainslie et al. 2023).  scale 0 is d^(-1/2); softcap c is c ·"
    " tanh(x / c), 0 none; a"
    " query sees keys less than `window` away, 0 all; of `documents`, where they are given,"
    " only keys of its own;"
    " `dropout` drops weights after the softmax.",
    _attended,
    operands=(Operand("q"), Operand("k"), Operand("v"), *LAST),
    attributes=(
        Attribute("mask", choices=("causal", "full")),
        Attribute(
            "window",
            default=0.0,
            range=(lambda value: value >= 0 and value % 1 == 0, "a whole number, 0 for all keys"),
        ),
        Attribute(
            "scale", default=0.0, range=(_at_least_0, "a number above 0, or 0 for head_dim^(-1/2)")
        ),
        Attribute(
            "softcap",
            default=0.0,
            range=(_at_least_0, "a number above 0, for instance 50, or 0 for none"),
        ),
        Attribute("dropout", default=0.0, share=True),
        evolve(SITE, default=0),
        DETERMINISTIC,
    ),
    roles=attention_roles,
    unsharded_dims=lambda types, op: frozenset(type.dims[-1] for type in types[:3]),
    whole_operands=lambda types, op: (
        dict.fromkeys((1, 2), frozenset((SEQUENCE,))) | documents_whole(types, op)
    ),
    reach=attention_reach,
    allows=_heads_alike,
    vjp=Vjp(
        result=True,
        workspace=partial(_attention_workspace, back=True),
        work=partial(attention_work, backward=True),
    ),
    function="attention",
    torch="attention",
    call=attention_call,
    stem="o",
    saves=_attention_saves,
    workspace=_attention_workspace,
    work=attention_work,
    deterministic=_in_one_order,
    user_visible=True,
)
