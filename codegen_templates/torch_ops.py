"""What programs of torch alone have in common: ops on DTensors, the parts of a step, state in
files, pipelines.

Written by scalec beside `train.py`, which imports what it uses.  The file needs nothing but torch,
and it is the same for every plan.  Change it, or copy it, as you like: only `scalec verify
--recheck` compares it with what was written.

    Parameters and inputs   weights and microbatches: each rank holds its part
    Local calls             functions that each rank calls on its parts of DTensors
    Ops, loss               products, norms, embeddings, cross entropy
    Rotary positions, attention, ring attention
    Recomputation           layers and values that backward computes again
    A step                  counts of labels, sums over ranks, loss scale, update
    State in files          checkpoints and weights as safetensors
    Pipelines               stages for torch.distributed.pipelining
    A run                   training on the bytes of a file

Shapes in this file are global.  DTensor finds the placements of most results by itself, and they
are the plan's; it has no good rule for products, embeddings and attention, so that each rank calls
these on its local tensors.
"""

# torch does not say that torch.distributed.checkpoint exports its own functions:
# pyright: reportPrivateImportUsage=false

import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import (
    _PipelineScheduleRuntime,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
)
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

# ---- Parameters and inputs


def weight(
    mesh: DeviceMesh,
    *sizes: int,
    placements: Sequence[Placement],
    mean: float = 0.0,
    std: float = 0.0,
) -> nn.Parameter:
    """A parameter of a global shape.

    Random values are drawn whole on every rank, by torch's seed: they are the same on any mesh.
    """
    if std:
        whole = torch.empty(sizes, device=mesh.device_type).normal_(mean, std)
    else:
        whole = torch.full(sizes, mean)
    return nn.Parameter(distribute(whole, mesh, placements))


def distribute(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor that all ranks have, as a DTensor: each rank keeps its part, and sends nothing."""
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)


def positions_along(x: Tensor, dim: int) -> DTensor:
    """0, 1, … along a dim of a DTensor, sharded as that dim is."""
    x = cast(DTensor, x)
    dim = dim % x.ndim
    placements: list[Placement] = []
    for placement in x.placements:
        placements.append(Shard(0) if placement == Shard(dim) else Replicate())
    return distribute(torch.arange(x.shape[dim], device=x.device), x.device_mesh, placements)


def by_microbatch(
    mesh: DeviceMesh,
    rows: Tensor,
    count: int,
    placements: Sequence[Placement],
    seq_first: bool,
    zigzag: int = 1,
) -> list[DTensor]:
    """The microbatches of a global batch, [rows, seq]; each rank keeps its part of each."""
    rows = rows[:, zigzag_order(rows.shape[1], zigzag)]
    microbatches: list[DTensor] = []
    for part in rows.chunk(count):
        if seq_first:
            part = part.T.contiguous()
        microbatches.append(distribute(part, mesh, placements))
    return microbatches


def zigzag_order(size: int, ranks: int) -> Tensor:
    """The positions of a sequence, ordered by the ranks that have them.

    Of 2n chunks, rank r has chunks r and 2n − 1 − r: under a causal mask all ranks then have the
    same work.  With one rank the order is 0, 1, …
    """
    positions = torch.arange(size)
    if ranks == 1:
        return positions
    chunks = positions.chunk(2 * ranks)
    ordered: list[Tensor] = []
    for rank in range(ranks):
        ordered += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(ordered)


# ---- Local calls


def on_each_rank(function: Callable[..., Any], placements: Sequence[Any], *operands: Tensor) -> Any:
    """A function of each rank's parts of the operands; its result is placed as `placements` say.

    If the function has several results, `placements` has a list for each.  Where an axis shards
    some operand, the gradients of the operands that it replicates are sums over its ranks.
    """
    tensors = [cast(DTensor, operand) for operand in operands]
    mesh = tensors[0].device_mesh
    in_placements = tuple(x.placements for x in tensors)
    sharding_axes: set[int] = set()
    for of_operand in in_placements:
        sharding_axes |= {i for i, place in enumerate(of_operand) if not place.is_replicate()}
    gradients: list[list[Placement]] = []
    for of_operand in in_placements:
        duals = [
            gradient_placement(place, i in sharding_axes) for i, place in enumerate(of_operand)
        ]
        gradients.append(duals)
    has_one_result = isinstance(placements[0], Placement)
    out_placements = [*placements] if has_one_result else tuple(placements)
    return local_map(function, out_placements, in_placements, tuple(gradients), mesh)(*operands)


def gradient_placement(place: Placement, is_sharding: bool) -> Placement:
    """The placement of an operand's gradient on an axis, which shards some operand or none."""
    if place.is_partial():
        return Replicate()
    if is_sharding and place.is_replicate():
        return Partial()
    return place


def once(x: Tensor, placements: Sequence[Placement]) -> Tensor:
    """The same values as a sum over ranks, which has them once: each rank has an equal part.

    `redistribute` leads to no Partial placement.  Each part has the gradient of the whole.
    """
    x = cast(DTensor, x)
    ranks = 1
    for size, before, after in zip(x.device_mesh.shape, x.placements, placements, strict=True):
        if after.is_partial() and not before.is_partial():
            ranks *= size
    local = x.to_local()
    part = local + (local / ranks - local).detach()
    return DTensor.from_local(part, x.device_mesh, placements, run_check=False)


# ---- Ops


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x·wᵀ.

    DTensor's own rule views x as a matrix, and on a mesh of 3 axes it then searches for placements
    for minutes.
    """
    last = x.ndim - 1
    placements: list[Placement] = []
    places = zip(cast(DTensor, x).placements, cast(DTensor, weight).placements, strict=True)
    for place_of_x, place_of_weight in places:
        placements.append(product_placement(place_of_x, place_of_weight, last))
    return on_each_rank(nn.functional.linear, placements, x, weight)


def product_placement(x: Placement, weight: Placement, last: int) -> Placement:
    """The placement of x·wᵀ on an axis; where it shards the dim that is summed, a sum is left."""
    if weight.is_replicate() and not x.is_shard(last):
        return x
    if weight.is_shard(0) and x.is_replicate():
        return Shard(last)
    if weight.is_shard(1) and x.is_shard(last):
        return Partial()
    raise ValueError(f"linear: no rule for {x} and {weight}")


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table`.

    DTensor's own rule masks rows that other ranks have on one axis of a mesh, and not on two.
    """
    placements: list[Placement] = []
    places = zip(cast(DTensor, tokens).placements, cast(DTensor, table).placements, strict=True)
    for place_of_tokens, place_of_table in places:
        if place_of_table.is_shard(0):
            placements.append(Partial())
        elif place_of_table.is_shard(1):
            placements.append(Shard(tokens.ndim))
        else:
            placements.append(place_of_tokens)
    rows = positions_along(table, 0)
    return on_each_rank(local_embedding, placements, tokens, table, rows)


def local_embedding(tokens: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Rows of this rank's part of a table, whose numbers are `rows`; zeros for other rows."""
    local = tokens - rows[0]
    outside = (local < 0) | (local >= len(rows))
    vectors = nn.functional.embedding(local.masked_fill(outside, 0), table)
    return vectors.masked_fill(outside.unsqueeze(-1), 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the weight's dims."""
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the weight's dims."""
    return nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def mean_square(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x² / size over some dims."""
    return x.to(sum_dtype(x)).square().sum(dim) / size


def rms_scaled(x: Tensor, weight: Tensor, square: Tensor, eps: float) -> Tensor:
    """x / sqrt(square + eps) · weight, where `square` is the mean of x² over the weight's dims."""
    root = (square + eps).rsqrt()
    for _ in weight.shape:
        root = root.unsqueeze(-1)
    return (x * root * weight).to(x.dtype)


def mean(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x / size over some dims."""
    return (x.sum(dim, dtype=sum_dtype(x)) / size).to(x.dtype)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def concat(*tensors: Tensor) -> Tensor:
    """Tensors concatenated along their last dims, and repeated along other dims of size 1."""
    shapes = [x.shape[:-1] for x in tensors]
    shape: torch.Size = cast(Any, torch).broadcast_shapes(*shapes)
    return torch.cat([x.expand(*shape, x.shape[-1]) for x in tensors], dim=-1)


def split(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Consecutive slices of the last dim."""
    return x.split_with_sizes(sizes, dim=-1)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


# ---- Loss


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    classes: int | None = None,
    smoothing: float = 0.0,
    z: float = 0.0,
) -> Tensor:
    """The sum of token losses; labels < 0 are ignored, columns from `classes` on are padding."""
    peak = max_logit(logits, classes)
    sum_exp, label_logit = local_softmax_stats(logits, peak, labels, classes, smoothing)
    return token_loss(sum_exp, label_logit, labels, peak if z else None, z)


def max_logit(logits: Tensor, classes: int | None = None) -> Tensor:
    """The largest logit, without gradient.

    It is Partial("max") over an axis that shards the vocabulary.
    """
    logits = logits.detach()
    if classes is not None:
        logits = torch.where(positions_along(logits, -1) < classes, logits, -torch.inf)
    return logits.amax(-1).to(sum_dtype(logits))


def local_softmax_stats(
    logits: Tensor,
    peak: Tensor,
    labels: Tensor,
    classes: int | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Σ exp(logit − peak), and the label's logit − peak.

    Both are Partial over an axis that shards the vocabulary.  With `smoothing` s the second is
    (1 − s) of the label's and s of the mean over all classes.
    """
    column = positions_along(logits, -1)
    below = logits.to(peak.dtype) - peak.unsqueeze(-1)
    if classes is not None:
        below = torch.where(column < classes, below, -torch.inf)
    label_logit = torch.where(labels.unsqueeze(-1) == column, below, 0.0).sum(-1)
    if smoothing:
        count = logits.shape[-1] if classes is None else classes
        all_logits = torch.where(column < count, below, 0.0).sum(-1)
        label_logit = (1 - smoothing) * label_logit + smoothing / count * all_logits
    return below.exp().sum(-1), label_logit


def token_loss(
    sum_exp: Tensor,
    label_logit: Tensor,
    labels: Tensor,
    peak: Tensor | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Σ log sum_exp − label_logit over tokens with label ≥ 0.

    With a peak, z_loss · (log sum_exp + peak)² is added.
    """
    log = sum_exp.log()
    loss = log - label_logit
    if peak is not None:
        loss = loss + z_loss * (log + peak).square()
    return torch.where(labels >= 0, loss, 0.0).sum()


# ---- Rotary positions


def rope_frequencies(
    mesh: DeviceMesh,
    seq: int,
    dim: int,
    theta: float,
    placements: Sequence[Placement],
    dtype: torch.dtype = torch.float32,
    scaling: str = "none",
    factor: float = 1.0,
    low: float = 1.0,
    high: float = 4.0,
    original: float = 8192.0,
    zigzag: int = 1,
    seq_dim: int = -3,
) -> Tensor:
    """Cosines and signed sines of rotary positions, [2, seq, 1, dim], for `rope`.

    `seq_dim` is the dim of the sequence in the tensors to rotate, counted from their end: for -4
    the table is [2, seq, 1, 1, dim].
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling != "none":
        kept = kept_frequencies(frequency, scaling, dim, theta, low, high, original)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = zigzag_order(seq, zigzag).double().outer(frequency)
    cosines = angle.cos().repeat(1, 2)
    sines = torch.cat([-angle.sin(), angle.sin()], dim=1)
    ones = [1] * (-2 - seq_dim)
    table = torch.stack([cosines, sines]).to(dtype).view(2, seq, *ones, dim)
    return distribute(table, mesh, placements)


def kept_frequencies(
    frequency: Tensor,
    scaling: str,
    dim: int,
    theta: float,
    low: float,
    high: float,
    original: float,
) -> Tensor:
    """The share of each frequency that stays as it is in a context longer than `original`.

    The rest is divided by a factor.  Frequencies that turn at least `high` times in the original
    context stay, and frequencies below `low` turns do not.
    """
    if scaling == "llama3":
        turns = original * frequency / (2 * math.pi)
        return ((turns - low) / (high - low)).clamp(0, 1)
    if scaling == "yarn":
        first = math.floor(dim / 2 * math.log(original / (2 * math.pi * high), theta))
        last = math.ceil(dim / 2 * math.log(original / (2 * math.pi * low), theta))
        first, last = max(first, 0), min(last, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64)
        return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return torch.zeros_like(frequency)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotates (x[i], x[i + d/2]) of the last dim, or of its first d, by the angles of a table."""
    turned = table.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rope(x[..., :turned], table), x[..., turned:]], -1)
    cosine, sine = table.unbind()
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


# ---- Attention


class Scores(NamedTuple):
    """How queries see keys.

    `order` has the positions of the sequence, ordered by the ranks that have them; queries and
    keys are numbered in that order.  `documents` is [batch, seq].
    """

    order: Tensor
    documents: Tensor | None
    causal: bool
    window: int
    scale: float | None
    softcap: float

    def seen(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether queries see keys: [rows, columns], or [batch, 1, rows, columns] where there are
        documents.
        """
        ahead = self.order[rows].unsqueeze(1) - self.order[columns]
        seen = ahead >= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.window:
            seen = seen & (ahead.abs() < self.window)
        if self.documents is None:
            return seen
        of_rows = self.documents[:, None, rows, None]
        of_columns = self.documents[:, None, None, columns]
        return seen & (of_rows == of_columns)

    def __call__(self, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """cap(q·kᵀ · scale), −∞ where a key is not seen: [batch, heads, rows, columns]."""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (q @ repeat_for_heads(k, q).mT).to(sum_dtype(q)) * scale
        if self.softcap:
            scores = softcap(scores, self.softcap)
        return scores.masked_fill(~self.seen(rows, columns), -torch.inf)


def repeat_for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of few heads, [batch, kv heads, seq, d], repeated for each head of queries."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str = "bshd",
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    documents: Tensor | None = None,
    zigzag: int = 1,
) -> Tensor:
    """softmax(cap(q·kᵀ · scale) + mask)·v on each rank's heads, samples and queries."""
    seq = layout.index("s")
    make_scores = partial(Scores, causal=causal, window=window, scale=scale, softcap=softcap)
    attend = partial(attend_locally, seq=seq, make_scores=make_scores, zigzag=zigzag)
    operands = [q, k, v, positions_along(q, seq)]
    if documents is not None:
        operands.append(documents)
    return on_each_rank(attend, cast(DTensor, q).placements, *operands)


def attend_locally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    documents: Tensor | None = None,
    *,
    seq: int,
    make_scores: Callable[..., Scores],
    zigzag: int,
) -> Tensor:
    """Attention of the queries that are number `rows` to all keys."""
    q, k, v = q.movedim(seq, -2), k.movedim(seq, -2), v.movedim(seq, -2)
    if documents is not None:
        documents = documents.movedim(seq, -1)
    scores = make_scores(zigzag_order(k.shape[-2], zigzag).to(k.device), documents)
    columns = torch.arange(k.shape[-2], device=k.device)
    if scores.softcap:  # torch's attention caps no scores
        weights = scores(q, k, rows, columns).softmax(-1).to(v.dtype)
        return (weights @ repeat_for_heads(v, q)).movedim(-2, seq)
    is_masked = scores.causal or bool(scores.window) or documents is not None
    has_all_rows = len(rows) == len(columns) and zigzag == 1
    is_plain = scores.causal and not scores.window and documents is None and has_all_rows
    mask = scores.seen(rows, columns) if is_masked and not is_plain else None
    how: dict[str, Any] = {"is_causal": is_plain, "scale": scores.scale}
    how["enable_gqa"] = q.shape[1] > k.shape[1]
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, **how).movedim(-2, seq)


# ---- Ring attention


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str = "bshd",
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    documents: Tensor | None = None,
    zigzag: int = 1,
    hops: int = 0,
) -> Tensor:
    """`attention` where one axis shards the sequence.

    Each rank sends keys and values to the next one of the axis, `hops` times.
    """
    seq = layout.index("s")
    placements = cast(DTensor, q).placements
    group = cast(DTensor, q).device_mesh.get_group(placements.index(Shard(seq)))
    make_scores = partial(Scores, causal=causal, window=window, scale=scale, softcap=softcap)
    attend = partial(
        attend_around_ring,
        seq=seq,
        make_scores=make_scores,
        zigzag=zigzag,
        group=group,
        hops=hops,
    )
    operands = [q, k, v]
    if documents is not None:
        operands.append(documents)
    return on_each_rank(attend, placements, *operands)


def attend_around_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    seq: int,
    make_scores: Callable[..., Scores],
    zigzag: int,
    group: dist.ProcessGroup,
    hops: int,
) -> Tensor:
    """Attention of a rank's queries to its own keys, and to the keys that reach it."""
    q, k, v = q.movedim(seq, -2), k.movedim(seq, -2), v.movedim(seq, -2)
    if documents is not None:
        documents = documents.movedim(seq, -1)
    order = zigzag_order(q.shape[-2] * group.size(), zigzag)
    scores = make_scores(order.to(q.device), documents)
    return cast(Any, Ring).apply(q, k, v, scores, group, hops).movedim(-2, seq)


class Ring(torch.autograd.Function):
    """Attention to some keys after others: results are merged by their log-sum-exp
    (arXiv:2310.01889).

    Backward needs a rank's own keys alone: the others go around once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        group: dist.ProcessGroup,
        hops: int,
    ) -> Tensor:
        """The result, [batch, heads, queries, d]."""
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=sum_dtype(q))
        log_sum = out.new_full((*q.shape[:-1], 1), -torch.inf)
        for keys, values, rows, columns in walk_ring(k, v, group, hops):
            hop_scores = scores(q, keys, rows, columns)
            new_log_sum = log_sum.logaddexp(hop_scores.logsumexp(-1, keepdim=True))
            weights = (hop_scores - new_log_sum).exp()
            more = weights @ repeat_for_heads(values, q).to(out.dtype)
            out = out * (log_sum - new_log_sum).exp() + more
            log_sum = new_log_sum
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.how = scores, group, hops
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of q, k and v.

        Gradients of keys and values go around with these, and at last to the ranks that own them.
        """
        q, k, v, out, log_sum = ctx.saved_tensors
        scores, group, hops = ctx.how
        grad = grad_outputs[0].to(out.dtype)
        grad_of_sum = (grad * out).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        wait_for_arrived: Callable[[], Tensor] | None = None
        for hop, (keys, values, rows, columns) in enumerate(walk_ring(k, v, group, hops)):
            inputs = [x.detach().requires_grad_() for x in (q, keys, values)]
            with torch.enable_grad():
                weights = (scores(inputs[0], inputs[1], rows, columns) - log_sum).exp()
                products = grad @ repeat_for_heads(inputs[2], q).to(out.dtype).mT
                total = (weights * (products - grad_of_sum)).sum()
            more, grad_keys, grad_values = torch.autograd.grad(total, inputs)
            grad_q = grad_q + more
            pair = pack_pair(grad_keys, grad_values).to(out.dtype)
            if wait_for_arrived is not None:
                pair = pair + wait_for_arrived()
            wait_for_arrived = send_on(pair, group, 1 if hop < hops else -hops)
        assert wait_for_arrived is not None, "ring attention: no hop"
        grad_k, grad_v = unpack_pair(wait_for_arrived(), k, v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def walk_ring(
    k: Tensor, v: Tensor, group: dist.ProcessGroup, hops: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The keys and values of each hop, the numbers of own queries, and the numbers of these keys.

    The next keys are on their way while a hop's are used.
    """
    rank, size = group.rank(), group.size()
    numbers = torch.arange(k.shape[-2] * size, device=k.device).chunk(size)
    pair = pack_pair(k, v)
    for hop in range(hops + 1):
        wait_for_next = send_on(pair, group, 1 if hop < hops else 0)
        keys, values = unpack_pair(pair, k, v)
        yield keys, values, numbers[rank], numbers[rank - hop]
        pair = wait_for_next()


def send_on(x: Tensor, group: dist.ProcessGroup, by: int) -> Callable[[], Tensor]:
    """Begins to send x to the rank that is `by` further.

    Returns the function that waits for the tensor that arrives here.
    """
    if not by:
        return lambda: x
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + by) % size)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - by) % size)
    works = dist.batch_isend_irecv([send, receive])

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return wait


def pack_pair(k: Tensor, v: Tensor) -> Tensor:
    """Keys and then values as one tensor."""
    return torch.cat([k.flatten(), v.flatten()])


def unpack_pair(pair: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of a pair, shaped as k and v are."""
    first, second = pair.split([k.numel(), v.numel()])
    return first.view(k.shape), second.view(v.shape)


# ---- Recomputation


def recomputed(layer: nn.Module, *args: Any, enabled: bool = True) -> Any:
    """A layer's result; backward recomputes everything in the layer but its arguments."""
    if not enabled:
        return layer(*args)
    return checkpoint(layer, *args, use_reentrant=False)


@contextmanager
def recompute(function: Callable[..., Any], *args: Any, **options: Any) -> Generator[Any]:
    """A function's results, a tensor or several: what reads them in the block does not save them
    for backward.

    Nothing is saved that the function makes.  `checkpoint` would keep its results.
    """
    if not torch.is_grad_enabled():
        yield function(*args, **options)
        return
    call = RecomputedCall(partial(function, **options), args)
    with saved_tensors_hooks(call.pack, call.unpack):
        result = function(*args, **options)
    call.results = to_tuple(result)
    with saved_tensors_hooks(call.pack_result, call.unpack):
        yield result
    call.results = ()


class RecomputedCall:
    """A call that backward makes once more, when it first needs a tensor of it.

    Each tensor that autograd would save gets a number: first the tensors inside of the call, then
    its results and their views.
    """

    def __init__(self, function: Callable[..., Any], args: Iterable[Any]) -> None:
        # the hooks of the blocks around this one, if there are any
        outer = cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(False)
        self.pack_outside, self.unpack_outside = outer or (identity, identity)
        self.function = function
        self.args = [self.hold(arg) for arg in args]
        self.arg_addresses = {address(arg) for arg in args if isinstance(arg, Tensor)}
        self.results: tuple[Tensor, ...] = ()
        self.inside = 0  # tensors inside of the call
        self.views: list[tuple[int, Callable[[Tensor], Tensor]]] = []  # of results, by their index
        self.made: dict[int, Tensor] = {}

    def hold(self, arg: Any) -> Callable[[], Any]:
        """The function that gives an argument in backward."""
        if not isinstance(arg, Tensor) or isinstance(arg, nn.Parameter):
            return lambda: arg
        packed = self.pack_outside(arg.detach())
        needs_gradient = arg.requires_grad
        return lambda: self.unpack_outside(packed).detach().requires_grad_(needs_gradient)

    def pack(self, saved: Tensor) -> Any:
        """While the call runs: a number in place of a tensor that it makes."""
        if address(saved) in self.arg_addresses:
            return self.pack_outside(saved)
        self.inside += 1
        return self, self.inside - 1

    def pack_result(self, saved: Tensor) -> Any:
        """After the call: a number in place of a result or of a view of one."""
        for i, result in enumerate(self.results):
            if address(result) == address(saved):
                self.views.append((i, make_view(saved)))
                return self, self.inside + len(self.views) - 1
        return self.pack_outside(saved)

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that was packed as this; each is asked for once."""
        if not (isinstance(packed, tuple) and packed[0] is self):
            return self.unpack_outside(packed)
        _, number = cast(tuple[object, int], packed)
        if number not in self.made:
            self.make()
        return self.made.pop(number)

    def make(self) -> None:
        """Makes the call once more, and keeps its tensors by their numbers."""
        args = [get_arg() for get_arg in self.args]
        arg_addresses = {address(arg) for arg in args if isinstance(arg, Tensor)}
        tensors: list[Tensor] = []

        def keep(x: Tensor) -> None:
            if address(x) not in arg_addresses:
                tensors.append(x.detach())

        with torch.enable_grad(), saved_tensors_hooks(keep, identity):
            results = to_tuple(self.function(*args))
        tensors += [view(results[i]) for i, view in self.views]
        self.made = dict(enumerate(tensors))


def make_view(saved: Tensor) -> Callable[[Tensor], Tensor]:
    """The function that makes the view that was saved, of a result that is computed again."""
    local = local_part(saved)
    shape, stride, offset = local.shape, local.stride(), local.storage_offset()

    def view_locally(made: Tensor) -> Tensor:
        return local_part(made.detach()).as_strided(shape, stride, offset)

    if not isinstance(saved, DTensor):
        return view_locally
    mesh, placements = saved.device_mesh, saved.placements
    how: dict[str, Any] = {"shape": saved.shape, "stride": saved.stride(), "run_check": False}
    return lambda made: DTensor.from_local(view_locally(made), mesh, placements, **how)


def local_part(x: Tensor) -> Tensor:
    """A rank's part of a DTensor; another tensor is its own part."""
    return getattr(x, "_local_tensor", x)


def address(x: Tensor) -> int:
    """Where a rank's part lies in memory."""
    return local_part(x).untyped_storage().data_ptr()


def to_tuple(results: Any) -> tuple[Tensor, ...]:
    """The results of a call, which may be a single tensor."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def identity(x: Any) -> Any:
    """The argument."""
    return x


# ---- A step


class Metrics(NamedTuple):
    """The mean loss of a step's labels, the norm of its gradients, the number of its labels."""

    loss: Tensor
    norm: Tensor
    tokens: int


def count_valid(labels: Sequence[Tensor]) -> int:
    """The number of labels ≥ 0 on all ranks: one all_reduce."""
    return int(whole_sum([(microbatch >= 0).sum() for microbatch in labels]))


def whole_sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of DTensors of the same placements, whole on each rank."""
    return cast(DTensor, reduce(torch.add, terms)).full_tensor()


def sum_gradients(module: nn.Module) -> None:
    """Has FSDP2 add up gradients over ranks: a step divides by its labels, not by its ranks."""
    sharded = cast(FSDPModule, module)
    sharded.set_gradient_divide_factor(1.0)
    # else FSDP2 asks for a collective that gloo does not have
    sharded.set_force_sum_reduction_for_comms(enable=True)


def each_module(modules: Iterable[nn.Module], reduce_now: bool, free: bool) -> None:
    """Says whether the next backward reduces gradients of modules, and frees their gathered
    parameters.
    """
    for module in modules:
        sharded = cast(FSDPModule, module)
        sharded.set_requires_gradient_sync(reduce_now, recurse=False)
        sharded.set_reshard_after_backward(free, recurse=False)


def reduced_gradients(model: nn.Module, dtype: torch.dtype | None = None) -> list[DTensor]:
    """All gradients, after the sums over ranks that are left.

    A sum is P→I in `dtype`, an all_reduce for each gradient.
    """
    gradients: list[DTensor] = []
    for parameter in model.parameters():
        gradient = cast(DTensor, parameter.grad)
        placements = cast(DTensor, parameter.data).placements
        if gradient.placements != placements:
            sent = cast(DTensor, gradient.to(dtype or gradient.dtype))
            gradient = cast(DTensor, sent.redistribute(placements=placements).to(gradient.dtype))
            parameter.grad = gradient
        gradients.append(gradient)
    return gradients


def total_norm(gradients: Sequence[DTensor]) -> Tensor:
    """The norm of all gradients: one sum over ranks for all that are placed alike."""
    squares: dict[tuple[Placement, ...], list[Tensor]] = {}
    for gradient in gradients:
        square = gradient.to(sum_dtype(gradient)).square().sum()
        squares.setdefault(tuple(gradient.placements), []).append(square)
    return torch.stack([whole_sum(terms) for terms in squares.values()]).sum().sqrt()


def param_group(
    model: nn.Module, *patterns: str, weight_decay: float, lr_scale: float = 1.0
) -> dict[str, Any]:
    """The parameters whose names fit a pattern, with the settings that they share.

    `*` in a pattern is the number of a layer.
    """
    words = [pattern.replace(".", r"\.").replace("*", r"\d+") for pattern in patterns]
    fits = re.compile("|".join(words))
    params = [param for name, param in model.named_parameters() if fits.fullmatch(name)]
    return {"params": params, "weight_decay": weight_decay, "lr_scale": lr_scale}


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """An update with the learning rate of a step; a group may have a scale of its own."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    optimizer.step()


def start_loss_scale(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the loss scale of fp16, so that its checkpoints have the scale too."""
    scale_and_steps(optimizer)


def loss_scale(optimizer: torch.optim.Optimizer) -> float:
    """The factor of this step's loss, which keeps gradients that are small in fp16."""
    scale, _ = scale_and_steps(optimizer)
    return scale.item()


def adapt_loss_scale(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Changes the loss scale as `torch.amp.GradScaler` does.

    It halves after an overflow, and doubles after 2,000 steps without one, up to 2²⁴.
    """
    scale, steps = scale_and_steps(optimizer)
    steps += 1
    factor = 1.0
    if not norm.isfinite():
        factor = 0.5
    elif steps.item() == 2000:
        factor = 2.0
    scale.mul_(factor).clamp_(max=2.0**24)
    if factor != 1:
        steps.zero_()


def scale_and_steps(optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """The loss scale of fp16, and the steps since it changed: both on the CPU, made at first."""
    first = torch.tensor(2.0**16), torch.tensor(0.0)
    return optimizer.param_groups[0].setdefault("loss_scale", first)


# ---- State in files


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Writes parameters and optimizer state as safetensors; `scalec convert` reads these.

    Each rank writes its own part.
    """
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(training_state(model, optimizer), storage_writer=writer)


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Reads what `save_checkpoint` or `scalec convert` has written, on any mesh."""
    reader = HuggingFaceStorageReader(folder)
    dcp.load(training_state(model, optimizer), storage_reader=reader)


def save_weights(model: nn.Module, names: Mapping[str, str], folder: str) -> None:
    """Writes the parameters as safetensors under Hugging Face's names, `NAMES` of the program.

    Each rank writes its own part; then the parts are joined.
    """
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(params_by_file_name(model, names), storage_writer=writer)


def load_weights(model: nn.Module, names: Mapping[str, str], folder: str) -> None:
    """Reads the parameters from files under Hugging Face's names; each rank reads its own part."""
    reader = HuggingFaceStorageReader(folder)
    dcp.load(params_by_file_name(model, names), storage_reader=reader)


def params_by_file_name(model: nn.Module, names: Mapping[str, str]) -> dict[str, Any]:
    """A model's parameters by the names that files have for them."""
    params: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        layer = re.search(r"\.(\d+)\.", name)
        tensor = names[re.sub(r"\.\d+\.", ".*.", name)]
        if layer:
            tensor = tensor.format(i=layer[1])
        params[tensor] = value
    return params


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters, optimizer state and loss scale by name, to save or to fill.

    State of the optimizer that is not there yet is made.
    """
    state: dict[str, Any] = dict(get_model_state_dict(model))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for key, value in get_optimizer_state_dict(model, optimizer, options=options).items():
        if isinstance(value, Tensor):
            state[f"optimizer.{key}"] = value
    if "loss_scale" in optimizer.param_groups[0]:
        scale, steps = scale_and_steps(optimizer)
        state |= {"optimizer/loss_scale": scale, "optimizer/loss_scale_steps": steps}
    return state


# ---- Pipelines


class Pipeline(nn.Module):
    """A rank's stages under the names of the whole model, and the schedules that run them.

    `rows` is a file with each rank's actions, as torch.distributed.pipelining reads them;
    evaluation runs its forwards.  `split` has the dim of the batch in each input.  `shared` has
    the ranks, on the pipeline's axis, of each parameter that several of them hold.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: str,
        stages: Sequence[PipelineStage],
        rows: Path,
        microbatches: int,
        split: Mapping[str, int],
        shared: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        for stage in stages:
            self.add_stage(cast(nn.Module, stage.submod))
        chunks = {name: TensorChunkSpec(dim) for name, dim in split.items()}
        options: dict[str, Any] = {"kwargs_chunk_spec": chunks, "loss_fn": mean_loss}
        options["scale_grads"] = False
        self.forwards = _PipelineScheduleRuntime([*stages], microbatches, **options)
        self.schedule = _PipelineScheduleRuntime([*stages], microbatches, **options)
        self.schedule._load_csv(str(rows), format="compute_comms")
        actions = self.schedule.pipeline_order_with_comms
        self.forwards.pipeline_order_with_comms = get_forwards(actions)
        self.microbatches = microbatches
        self.group = mesh.get_group(axis)
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.counted_elsewhere: set[str] = set()
        for name, ranks in shared.items():
            self.groups[name] = make_group(mesh, axis, ranks)
            if ranks[0] != mesh.get_local_rank(axis):
                self.counted_elsewhere.add(name)

    def add_stage(self, stage: nn.Module) -> None:
        """Takes in a stage's parameters, and its layers by their numbers in the whole model."""
        for name, param in stage.named_parameters(recurse=False):
            self.register_parameter(name, param)
        for name, child in stage.named_children():
            if not isinstance(child, nn.ModuleDict):
                self.add_module(name, child)
            elif name in self._modules:
                cast(nn.ModuleDict, self.get_submodule(name)).update(cast(Any, child))
            else:
                self.add_module(name, nn.ModuleDict(cast(Any, child)))

    def run(self, batch: Mapping[str, Tensor], num_tokens: float, backward: bool) -> Tensor:
        """Forward, and perhaps backward, of all microbatches.

        Returns the mean loss of `num_tokens` labels, on all ranks.
        """
        losses: list[Tensor] = []
        step: Callable[..., object] = self.schedule.step if backward else self.forwards.eval
        target = torch.full((self.microbatches,), num_tokens or 1)
        step(**batch, target=target, losses=losses, return_outputs=False)
        if losses:
            return self.sum_over_stages(whole_sum([loss.detach() for loss in losses]))
        param = next(self.parameters())
        return self.sum_over_stages(torch.zeros((), dtype=sum_dtype(param), device=param.device))

    def gradients(self, dtype: torch.dtype | None = None) -> list[DTensor]:
        """All gradients, after the sums over ranks, and over stages that share a parameter."""
        gradients = reduced_gradients(self, dtype)
        for (name, _), gradient in zip(self.named_parameters(), gradients, strict=True):
            if name in self.groups:
                dist.all_reduce(gradient.to_local(), group=self.groups[name])
        return gradients

    def total_norm(self, gradients: Sequence[DTensor]) -> Tensor:
        """The norm of all stages' gradients; a gradient that several ranks hold counts once."""
        counted: list[DTensor] = []
        for (name, _), gradient in zip(self.named_parameters(), gradients, strict=True):
            if name not in self.counted_elsewhere:
                counted.append(gradient)
        return self.sum_over_stages(total_norm(counted).square()).sqrt()

    def sum_over_stages(self, part: Tensor) -> Tensor:
        """The sum of all stages' parts."""
        dist.all_reduce(part, group=self.group)
        return part


def mean_loss(loss_sum: Tensor, num_tokens: Tensor) -> Tensor:
    """A microbatch's share of the mean loss; a schedule gives each its entry of `target`."""
    return loss_sum / num_tokens.item()


def get_forwards(rows: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """The actions of evaluation: forwards, what they send and receive, and gathered parameters."""
    forwards: dict[int, list[Any]] = {}
    for rank, row in rows.items():
        forwards[rank] = [action for action in row if re.search("F|SHARD", str(action))]
    return forwards


def make_group(mesh: DeviceMesh, axis: str, places: Sequence[int]) -> dist.ProcessGroup:
    """The group of some ranks of a mesh axis: the ranks at these places, beside this rank on all
    other axes.
    """
    axes = cast(tuple[str, ...], mesh.mesh_dim_names)
    number = axes.index(axis)
    lines = mesh.mesh.movedim(number, -1).reshape(-1, mesh.size(number))
    ranks = lines[:, [*places]].tolist()
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(ranks)[0])


def pipeline_stage(
    module: nn.Module,
    stage: int,
    stages: int,
    mesh: DeviceMesh,
    axis: str,
    crossing: Callable[[int], Sequence[tuple[Tensor, Tensor | None]]],
) -> PipelineStage:
    """A stage; `crossing` gives examples of the values that cross after a stage, with gradients."""
    received = crossing(stage - 1) if stage else []
    sent = crossing(stage) if stage < stages - 1 else [(torch.empty(()), None)]
    return PipelineStage(
        module,
        stage,
        stages,
        torch.device(mesh.device_type),
        input_args=tuple(value for value, _ in received),
        input_grads=tuple(gradient for _, gradient in received),
        output_args=tuple(value for value, _ in sent),
        output_grads=tuple(gradient for _, gradient in sent),
        group=mesh.get_group(axis),
    )


def example(
    mesh: DeviceMesh,
    *sizes: int,
    dtype: torch.dtype,
    placements: Sequence[Placement],
    gradient: Sequence[Placement] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A value of a global shape, and its gradient if it has one.

    `PipelineStage` reads shapes and placements from it.
    """
    make = partial(empty, sizes, dtype=dtype, device_mesh=mesh)
    value = make(placements=placements, requires_grad=gradient is not None)
    if gradient is None:
        return value, None
    return value, make(placements=gradient)


def stage_module(make: Callable[[int], nn.Module], stage: int) -> nn.Module:
    """The module of a stage.

    All stages draw the same random values, and each keeps its own.
    """
    with torch.random.fork_rng():
        return make(stage)


def stage_layers(make_layer: Callable[[], nn.Module], count: int, own: range) -> nn.ModuleDict:
    """A stage's own layers by number.

    All layers are made, so that random values are the same on any mesh.
    """
    layers: dict[str, nn.Module] = {}
    for number in range(count):
        layer = make_layer()
        if number in own:
            layers[str(number)] = layer
    return nn.ModuleDict(layers)


def share(stages: Sequence[nn.Module], name: str) -> None:
    """Gives a rank's stages that have a parameter of this name one and the same parameter."""
    having = [stage for stage in stages if hasattr(stage, name)]
    for stage in having[1:]:
        stage.register_parameter(name, getattr(having[0], name))


def all_microbatches(microbatches: Sequence[Tensor], dim: int) -> DTensor:
    """Microbatches as one DTensor; a schedule splits each rank's part again."""
    parts = [cast(DTensor, microbatch) for microbatch in microbatches]
    local = torch.cat([part.to_local() for part in parts], dim)
    return DTensor.from_local(local, parts[0].device_mesh, parts[0].placements, run_check=False)


# ---- A run


def start_run(sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of a run that torchrun started on a file, with the sizes of its axes."""
    ranks = math.prod(sizes.values())
    if os.environ.get("WORLD_SIZE") != str(ranks) or len(sys.argv) < 2:
        start = f"torchrun starts this, with a world size of {ranks}, on a FILE"
        sys.exit(f"error: {start}: see the first lines")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh(device, (*sizes.values(),), mesh_dim_names=(*sizes,))


def read_bytes(path: str) -> Tensor:
    """The bytes of a file as tokens."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()


def random_windows(tokens: Tensor, count: int, size: int) -> Tensor:
    """Random windows, [count, size]: the same on all ranks, by torch's seed."""
    begins = torch.randint(len(tokens) - size + 1, (count, 1))
    return tokens[begins + torch.arange(size)]
