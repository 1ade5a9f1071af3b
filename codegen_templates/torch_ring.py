"""Attention around a ring of ranks, on DTensors, for programs of torch alone (`torch_ops`)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .torch_attention import Scores, for_each_head
from .torch_ops import on_each_rank, wide, zigzag_order


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
    """`attention` where one axis shards the sequence: each rank sends keys and values on to the next, `hops` times."""
    seq, mesh, placements = layout.index("s"), cast(DTensor, q).device_mesh, cast(DTensor, q).placements
    group = mesh.get_group(placements.index(Shard(seq)))
    of = partial(Scores, causal=causal, window=window, scale=scale, softcap=softcap)
    attend = partial(attend_around, seq=seq, of=of, zigzag=zigzag, group=group, hops=hops)
    return on_each_rank(attend, placements, q, k, v, *([] if documents is None else [documents]))


def attend_around(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    seq: int,
    of: Callable[..., Scores],
    zigzag: int,
    group: dist.ProcessGroup,
    hops: int,
) -> Tensor:
    """Attention of a rank's queries, keys and values."""
    q, k, v = (x.movedim(seq, -2) for x in (q, k, v))
    of_rows = None if documents is None else documents.movedim(seq, -1)
    scores = of(zigzag_order(q.shape[-2] * group.size(), zigzag).to(q.device), of_rows)
    return cast(Any, Ring).apply(q, k, v, scores, group, hops).movedim(-2, seq)


class Ring(torch.autograd.Function):
    """Results of some keys after others, merged by their log-sum-exp (arXiv:2310.01889); saves a rank's own keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: Scores, group: dist.ProcessGroup, hops: int
    ) -> Tensor:
        """The result, [batch, heads, queries, d]."""
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide(q))
        lse = out.new_full((*q.shape[:-1], 1), -torch.inf)
        for keys, values, places in around(k, v, group, hops):
            now = scores(q, keys, *places)
            both = lse.logaddexp(now.logsumexp(-1, keepdim=True))
            out = out * (lse - both).exp() + (now - both).exp() @ for_each_head(values, q).to(out.dtype)
            lse = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = scores, group, hops
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of q, k and v: those of keys go around with the keys, and last to the ranks whose they are."""
        q, k, v, out, lse = ctx.saved_tensors
        scores, group, hops = ctx.how
        grad = grad_outputs[0].to(out.dtype)
        own = (grad * out).sum(-1, keepdim=True)
        of_q, arrived = torch.zeros_like(q, dtype=out.dtype), None
        for hop, (keys, values, places) in enumerate(around(k, v, group, hops)):
            given = [x.detach().requires_grad_() for x in (q, keys, values)]
            with torch.enable_grad():
                weights = (scores(*given[:2], *places) - lse).exp()
                total = (weights * (grad @ for_each_head(given[2], q).to(out.dtype).mT - own)).sum()
            more, *of_keys = torch.autograd.grad(total, given)
            of_q, flat = of_q + more, flattened(*of_keys).to(out.dtype)
            arrived = sent_on(flat if arrived is None else flat + arrived(), group, 1 if hop < hops else -hops)
        assert arrived is not None, "ring attention: no hop"
        of_k, of_v = unpacked(arrived(), k, v)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, None


def around(
    k: Tensor, v: Tensor, group: dist.ProcessGroup, hops: int
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """The keys and values of each hop, with the numbers of own positions and of theirs; the next are on the way."""
    rank, size, here = group.rank(), group.size(), flattened(k, v)
    places = torch.arange(k.shape[-2] * size, device=k.device).chunk(size)
    for hop in range(hops + 1):
        coming = sent_on(here, group, 1 if hop < hops else 0)
        yield *unpacked(here, k, v), (places[rank], places[rank - hop])
        here = coming()


def sent_on(x: Tensor, group: dist.ProcessGroup, by: int) -> Callable[[], Tensor]:
    """Begins to send x to the rank that is `by` further; returns what waits for the tensor that comes here."""
    if not by:
        return lambda: x
    rank, size, there = group.rank(), group.size(), torch.empty_like(x)
    sends = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + by) % size)
    receives = dist.P2POp(dist.irecv, there, group=group, group_peer=(rank - by) % size)
    works = dist.batch_isend_irecv([sends, receives])

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return there

    return arrived


def flattened(k: Tensor, v: Tensor) -> Tensor:
    """Keys and then values as one tensor."""
    return torch.cat([k.flatten(), v.flatten()])


def unpacked(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Its parts, as k and v are shaped."""
    first, second = flat.split([k.numel(), v.numel()])
    return first.view(k.shape), second.view(v.shape)
