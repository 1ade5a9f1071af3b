"""Attention.

A rank may have the queries of a part of the sequence: then it has the keys, values and documents of
the whole sequence.
"""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TypeVar

from attrs import evolve

from ..ir import BATCH, DATA_DIMS, SEQUENCE, Op, Placement, Type
from ..ir.splits import runs_of_ranks
from .call import Argument, Call, Keyword, Positions, part_of
from .dropout import DRAWS, SITE, check_draws
from .protocol import DETERMINISTIC, Attribute, OpDef, Operand, Shape, TypingError, Vjp
from .reach import Reach
from .roles import Roles
from .saved_tensors import Local, Saved
from .work import Scores, Work

DOCUMENTS = Operand("documents", input_name="documents", optional=True)
"""Which document each token is of."""

LAST = (DOCUMENTS, evolve(DRAWS, optional=True))
"""The optional operands after an op's others; draws are given where it has `dropout`, and only
there.
"""

T = TypeVar("T")


def documents_and_draws(op: Op, optional: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The optional operands after an op's others: the documents and the draws, each one or none."""
    cut = len(optional) - ("dropout" in dict(op.attrs))
    return optional[:cut], optional[cut:]


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
    """The dims that count query heads and key/value heads: of each operand the only dim besides
    batch, sequence and the last.
    """
    return _heads(q), _heads(k)


def _heads(type: Type) -> str:
    dims = [dim for dim in type.dims[:-1] if dim not in DATA_DIMS]
    if len(dims) != 1 or SEQUENCE not in type.dims:
        raise TypingError(
            f"attention takes [batch, seq, heads, head_dim], not [{', '.join(type.dims)}]"
        )
    return dims[0]


def attention_roles(types: Sequence[Type], op: Op) -> Roles:
    """The roles of an op whose first operands are queries and keys."""
    heads, kv_heads = head_dims(*types[:2])
    return Roles(query_seq=SEQUENCE, key_seq=SEQUENCE, heads=heads, kv_heads=kv_heads)


def _attention_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    q, k, v, *optional = types
    documents, draws = documents_and_draws(op, optional)
    heads, kv_heads = head_dims(q, k)
    key_dims: list[str] = []
    for dim in q.dims:
        key_dims.append(kv_heads if dim == heads else dim)
    if k.dims[:-1] != v.dims[:-1] or k.dims != tuple(key_dims):
        raise TypingError(
            "attention needs queries, keys and values of the same dims but for the heads and"
            " the last of values"
        )
    if v.dims[-1] in q.dims[:-1]:
        raise TypingError(f"attention's result would have `{v.dims[-1]}` twice")
    token_dims = tuple(dim for dim in q.dims[:-1] if dim != heads)
    if any(document.dims != token_dims for document in documents):
        raise TypingError(
            "attention needs documents of the same dims as queries but for the heads and the last"
        )
    if len(documents) > 1 or len(draws) != ("dropout" in dict(op.attrs)):
        raise TypingError("attention takes draws where it has dropout, and only there")
    for draw in draws:
        check_draws(draw, q)
    return [(q.dtype, (*q.dims[:-1], v.dims[-1]))]


def attention_reach(types: Sequence[Type], op: Op) -> dict[int, Reach]:
    """The reach into keys and values: within the window, and within the query's document.

    Only attention without a causal mask reaches keys after the query.
    """
    documents, _ = documents_and_draws(op, range(3, len(types)))
    nearest = (window_of(op) or inf) - 1
    after = 0 if op.get("mask") == "causal" else nearest
    return dict.fromkeys((1, 2), Reach(nearest, after, bool(documents)))


def documents_whole(types: Sequence[Type], op: Op) -> dict[int, frozenset[str]]:
    """Each rank has the documents of the whole sequence."""
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


def query_rows(local: Local) -> int:
    """The number of a rank's queries, of all heads and samples."""
    return local.elements() // local.program.size(local.types[0].dims[-1])


def result_elements(local: Local) -> int:
    """The number of elements of the result on a rank; its last dim is the last dim of values."""
    return query_rows(local) * local.program.size(local.types[2].dims[-1])


def _attention_saves(local: Local) -> Saved:
    """The saved tensors of flash attention where there is a kernel; with a cap or dropout, all
    scores.

    scalec's own kernel needs no mask.
    """
    attrs = dict(local.op.attrs)
    if "dropout" in attrs or ("softcap" in attrs and not local.kernels):
        return _scores(local)
    masks, padded = 0, dict[int, int]()
    if not (local.kernels and is_special(local)):  # torch's own attention
        masks, padded = _masks(local) * local.item, _bytes_of_wider_rows(local)
    others: list[tuple[str, int]] = []
    if masks:
        others.append(("mask", masks))
    others.append(("logsumexp", query_rows(local) * local.wide))
    for operand, size in padded.items():
        if operand < 3:
            others.append((f"{_NAMES[operand]}, padded", size))
    operands = tuple(i for i in range(3) if i not in padded)
    if _chunks(local) > 1:
        size = padded.get(3, result_elements(local) * local.item)
        return Saved(operands, others=(("result of each chunk", size), *others))
    if 3 in padded:
        return Saved(operands, others=((WIDER, padded[3]), *others))
    return Saved(operands, results=(0,), others=tuple(others))


WIDER = "result, padded"
"""The tensor that a narrower result is cut out of; so the result is not in one piece."""

_NAMES = ("queries", "keys", "values")


def _bytes_of_wider_rows(local: Local) -> dict[int, int]:
    """The bytes of the tensors that torch's attention for CPUs has with wider rows, by number.

    Numbers 0 to 2 are q, k and v; 3 is the result.
    """
    if local.device != "cpu":
        return {}
    widths = [local.program.size(type.dims[-1]) for type in local.types[:3]]
    rows = [local.elements(i) // width for i, width in enumerate(widths)]
    widest = max(widths)
    padded: dict[int, int] = {}
    tensors = zip((*widths, widths[2]), (*rows, query_rows(local)), strict=True)
    for number, (width, count) in enumerate(tensors):
        if width < widest:
            padded[number] = count * widest * local.item
    return padded


def _chunks(local: Local) -> int:
    """The number of parts of a rank's queries, each a call on the keys that it can see; 1 where
    any key can be seen.
    """
    q, size = local.types[0], local.program.size(SEQUENCE)
    sees_part = dict(local.op.attrs)["mask"] == "causal" or 0 < window_of(local.op) < size
    if not q.axes_of(SEQUENCE) or not sees_part:
        return 1
    return max(map(len, runs_of_ranks(local.program, q, SEQUENCE)))


def _masks(local: Local) -> int:
    """The elements of the masks that torch's kernel is given for all chunks of a rank's queries, on
    the rank with most.

    A window or documents make one, and so do keys before the first query, which the kernel for CPUs
    does not know.
    """
    size, window = local.program.size(SEQUENCE), window_of(local.op)
    causal = dict(local.op.attrs)["mask"] == "causal"
    documents, _ = documents_and_draws(local.op, local.types[3:])
    window = window if window < size else 0
    if not local.types[0].axes_of(SEQUENCE):
        return _pairs(local) if window or documents else 0

    def mask_elements(start: int, stop: int) -> int:
        """The elements of the mask of the queries from `start` to `stop`, of one sample."""
        masked = window or documents or (causal and start and local.device == "cpu")
        if not masked:
            return 0
        first, last = 0, size
        if window:
            first = max(start + 1 - window, 0)
        if causal:
            last = min(stop, size)
        elif window:
            last = min(stop + window - 1, size)
        return (stop - start) * (last - first)

    samples = local.program.elements(documents[0]) // size if documents else 1
    most = 0
    for runs in runs_of_ranks(local.program, local.types[0], SEQUENCE):
        most = max(most, sum(mask_elements(*run) for run in runs))
    return samples * most


def _scores(local: Local) -> Saved:
    """Keys and values repeated for each query head, their weights, and what these are made from."""
    q, attrs = local.types[0], dict(local.op.attrs)
    size, item = local.program.size(SEQUENCE), local.item
    scores = query_rows(local) * size
    others = [
        ("keys of each head", local.bytes()),
        ("values of each head", result_elements(local) * item),
        ("softmax", scores * local.wide),
        ("seen", _pairs(local)),
    ]
    if "softcap" in attrs:
        others.append(("tanh", scores * local.wide))
    if "dropout" in attrs or item < local.wide:
        others.append(("weights", scores * item))
    # queries lie by head without a copy where the sequence is outermost, or where it, the batch or
    # the heads are of size 1
    outer_sizes: list[int] = []
    for dim, local_size in zip(q.dims, local.program.local_shape(q), strict=True):
        if dim not in (SEQUENCE, q.dims[-1]):
            outer_sizes.append(local_size)
    operands: list[int] = []
    if q.dims.index(SEQUENCE) == 0 or 1 in outer_sizes or size == 1:
        operands.append(0)
    else:
        others.append(("queries by head", local.bytes()))
    if "dropout" in attrs:
        operands.append(len(local.types) - 1)
    return Saved(operands=tuple(operands), others=tuple(others))


QUERIES = 256
"""The number of queries for which scalec's own attention in plain torch has scores at a time."""


def _attention_workspace(local: Local, back: bool = False) -> int:
    """The workspace of torch's attention, or of scalec's where torch has no kernel: its kernels
    need none.
    """
    attrs, size = dict(local.op.attrs), local.program.size(SEQUENCE)
    if not local.kernels or "dropout" in attrs or not is_special(local):
        queries = local.program.local_size(local.types[0], SEQUENCE) // _chunks(local)
        return _scores_twice(local) or flash_workspace(local, back, queries, size)
    if local.runs_kernel:
        return 0
    scores = scores_of_some(local, back, size)
    if back and local.is_narrow:  # gradients are summed in float32
        return scores + sum(map(local.wide_bytes, range(3)))
    return scores


def is_special(local: Local) -> bool:
    """Whether an op has a mask other than a causal one, or a soft cap: torch's flash attention
    knows neither.
    """
    return (
        "softcap" in dict(local.op.attrs)
        or 0 < window_of(local.op) < local.program.size(SEQUENCE)
        or len(local.types) > 3
    )


def _in_one_order(local: Local) -> bool:
    """Whether sums always go in one order.

    They do unless it is torch's kernel on GPUs: there, in backward, blocks of keys add to dq as
    they come.
    """
    has_own_scores = bool({"softcap", "dropout"} & {*dict(local.op.attrs)})
    return has_own_scores or (local.kernels and is_special(local))


def scores_of_some(local: Local, back: bool, size: int) -> int:
    """The workspace where scores are computed for some queries at a time, with the results of the
    queries before.

    A call is of `size` queries and as many keys.
    """
    capped, window = "softcap" in dict(local.op.attrs), window_of(local.op)
    queries = min(size, QUERIES)
    keys = min(size, window + queries) if window else size
    keys_before = min(size - queries, keys)
    # functions of the scores that there are of these queries, and that stay of earlier queries
    current, earlier = (6, 1) if back else (3 + capped, 1 + capped)
    heads = query_rows(local) // local.program.local_size(local.types[0], SEQUENCE)
    return heads * queries * (current * keys + earlier * keys_before) * local.wide


def _scores_twice(local: Local) -> int:
    """The workspace where all scores are in memory, two functions of them at a time."""
    if not {"softcap", "dropout"} & {*dict(local.op.attrs)}:
        return 0
    return 2 * query_rows(local) * local.program.size(SEQUENCE) * local.wide


MULTIPROCESSORS = 148
"""Multiprocessors of a B200; an H100 has 132.

In a deterministic backward the multiprocessors that share a head sum dq apart.
"""


def flash_workspace(local: Local, back: bool, queries: int, keys: int) -> int:
    """The workspace in bytes of torch's flash attention, of so many queries and keys.

    On CUDA, backward, it has the sums of dq in float32, a number for each of its rows, and dk and
    dv of each query head.  torch's copy of FlashAttention-2 allocates them
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: dq_accum, softmax_d,
    dk_expanded, dv_expanded), unmeasured; cuDNN's workspace is of the same size.
    """
    if local.device == "cpu":
        return _cpu_flash_workspace(local, back, queries, keys)
    if not back or not local.is_narrow:
        return 0
    repeated = 0
    if local.elements(1) < local.elements():
        repeated = local.bytes() + result_elements(local) * local.item
    samples_and_heads = query_rows(local) // local.program.local_size(local.types[0], SEQUENCE)
    sums = 1
    if DETERMINISTIC.name in dict(local.op.attrs):
        sums = -(-MULTIPROCESSORS // samples_and_heads)
    return local.wide_bytes() * sums + query_rows(local) * local.wide + repeated


def _cpu_flash_workspace(local: Local, back: bool, queries: int, keys: int) -> int:
    """The workspace in bytes of torch's flash attention for CPUs.

    It has the scores that one thread has at a time, and backward their gradients, in float32, and
    once more in the operands' own type if that is narrower.  Backward copies the result's gradient
    unless it is [batch, seq, heads, d] without gaps
    (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    if queries >= 768:
        rows = min(queries, 256)
    elif queries >= 192:
        rows = min(queries, 64)
    else:
        rows = min(queries, 32)
    item = local.wide + local.is_narrow * local.item
    q = local.types[0]
    part = local.program.local_size(q, SEQUENCE)
    has_no_gaps = local.program.local_size(q, BATCH) == 1 or (
        q.dims.index(SEQUENCE) == 1 and queries == part
    )
    copied = 0
    if back and not has_no_gaps:
        copied = result_elements(local) * local.item * queries // part
    return (1 + back) * rows * min(keys, 512) * item + copied


def _pairs(local: Local) -> int:
    """The elements of a mask: of a rank's queries and all keys, for each sample where there are
    documents.
    """
    documents, _ = documents_and_draws(local.op, local.types[3:])
    queries = local.program.local_size(local.types[0], SEQUENCE)
    if documents:
        return queries * local.program.elements(documents[0])
    return queries * local.program.size(SEQUENCE)


def attention_work(local: Local, backward: bool = False) -> Work:
    """The work on pairs of queries and keys, of the rank that has most of them.

    All scores are made where they are saved.
    """
    q, size = local.types[0], local.program.size(SEQUENCE)
    causal, window = local.op.get("mask") == "causal", window_of(local.op)

    def pairs(start: int, stop: int) -> int:
        """How many pairs the queries from `start` to `stop` have."""
        if not causal and not window:
            return (stop - start) * size
        of_causal = seen_pairs(stop, True, window) - seen_pairs(start, True, window)
        if causal:
            return of_causal
        return 2 * of_causal - (stop - start)  # the window reaches both ways

    most = 0
    for runs in runs_of_ranks(local.program, q, SEQUENCE):
        most = max(most, sum(pairs(*run) for run in runs))
    heads = query_rows(local) // local.program.local_size(q, SEQUENCE)
    width = local.program.size(q.dims[-1])
    value_width = local.program.size(local.types[2].dims[-1])
    # of torch's kernels, FlashAttention-2 alone adds in one order
    in_one_order = DETERMINISTIC.name in dict(local.op.attrs)
    torch_picks = not (is_special(local) or in_one_order)
    scores = Scores(heads, size, most, width, value_width, backward, torch_picks=torch_picks)
    return Work(q.dtype, scores=scores)


def attention_call(local: Local) -> Call:
    """The order of dims, what differs from causal attention, and where weights are dropped the
    ranks' heads.
    """
    q, attrs = local.types[0], dict(local.op.attrs)
    documents, draws = documents_and_draws(local.op, range(3, len(local.types)))
    heads = attention_roles(local.types, local.op).heads
    letters = {BATCH: "b", SEQUENCE: "s", heads: "h", q.dims[-1]: "d"}
    layout = "".join(letters[dim] for dim in q.dims)
    options: dict[str, Argument] = {}
    if layout != "bshd":
        options["layout"] = layout
    if attrs.pop("mask") == "full":
        options["causal"] = False
    if attrs.pop("window", 0):
        options["window"] = window_of(local.op)
    options |= attrs
    if DETERMINISTIC.name in attrs:
        options[DETERMINISTIC.name] = attrs[DETERMINISTIC.name] == "on"
    if documents:
        options["documents"] = Keyword(documents[0])
    if draws:
        options["draws"] = Keyword(draws[0])
    if draws and q.axes_of(heads):
        options["heads"] = part_of(local, q, heads)
    if axes := q.axes_of(SEQUENCE):
        options["positions"] = Positions(SEQUENCE, axes)
    return Call(options=options)


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
    _attention_shape,
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
