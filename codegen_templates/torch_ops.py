"""Ops on DTensors for programs of torch alone; such a program holds the source of those that it calls.

Shapes are global.  DTensor finds the placements of results, which are those of the IR; only products, tables and
attention are called on local tensors, since it has no good rule for them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint


def weight(
    mesh: DeviceMesh, *sizes: int, placements: Sequence[Placement], mean: float = 0.0, std: float = 0.0
) -> nn.Parameter:
    """A parameter of a global shape; random values are those of torch's seed, the same on any mesh."""
    whole = torch.empty(sizes, device=mesh.device_type).normal_(mean, std) if std else torch.full(sizes, mean)
    return nn.Parameter(placed(whole, mesh, placements))


def placed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor that all ranks have, of which each keeps its part; nothing is sent."""
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)


def counted(x: Tensor, dim: int) -> DTensor:
    """0, 1, … along a dim of a DTensor, placed as that dim is."""
    x = cast(DTensor, x)
    along = [Shard(0) if each == Shard(dim % x.ndim) else Replicate() for each in x.placements]
    return placed(torch.arange(x.shape[dim], device=x.device), x.device_mesh, along)


def by_microbatch(
    mesh: DeviceMesh, rows: Tensor, count: int, placements: Sequence[Placement], seq_first: bool, zigzag: int = 1
) -> list[DTensor]:
    """The microbatches of a global batch, [rows, seq], of which each rank keeps its part."""
    rows = rows[:, zigzag_order(rows.shape[1], zigzag)]
    parts = (part.T.contiguous() if seq_first else part for part in rows.chunk(count))
    return [placed(part, mesh, placements) for part in parts]


def once(x: Tensor, placements: Sequence[Placement]) -> Tensor:
    """The same values as a sum over ranks, of equal parts; `redistribute` leads to no Partial placement."""
    x = cast(DTensor, x)
    new = [place.is_partial() and not own.is_partial() for own, place in zip(x.placements, placements, strict=True)]
    ranks = math.prod(size for size, each in zip(x.device_mesh.shape, new, strict=True) if each)
    local = x.to_local()
    part = local + (local / ranks - local).detach()  # of which each part has the whole gradient
    return DTensor.from_local(part, x.device_mesh, placements, run_check=False)


def on_each_rank(function: Callable[..., Any], placements: Sequence[Any], *operands: Tensor) -> Any:
    """A function of the operands' parts, with a result placed so; for functions that DTensor has no good rule for.

    Of a function with several results, `placements` has a list for each.  On an axis that shards some operand, the
    gradients of those that it replicates are sums over ranks.
    """
    places = [cast(DTensor, each).placements for each in operands]
    split = [any(not each.is_replicate() for each in axis) for axis in zip(*places, strict=True)]
    duals = [[dual(place, cut) for place, cut in zip(each, split, strict=True)] for each in places]
    mesh = cast(DTensor, operands[0]).device_mesh
    to = [*placements] if isinstance(placements[0], Placement) else tuple(placements)
    return local_map(function, to, (*places,), (*duals,), mesh)(*operands)


def dual(place: Placement, split: bool) -> Placement:
    """The placement of a gradient, on an axis that shards some operand or none."""
    if place.is_partial():
        return Replicate()
    return Partial() if split and place.is_replicate() else place


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x·wᵀ.  DTensor's own rule views x as a matrix, and then searches minutes for placements on a mesh of 3 axes."""
    pairs = zip(cast(DTensor, x).placements, cast(DTensor, weight).placements, strict=True)
    return on_each_rank(nn.functional.linear, [of_product(*pair, x.ndim - 1) for pair in pairs], x, weight)


def of_product(x: Placement, weight: Placement, last: int) -> Placement:
    """The placement of a product on an axis: sums over a dim that both share out are still to be done."""
    if weight.is_replicate() and not x.is_shard(last):
        return x
    if weight.is_shard(0) and x.is_replicate():
        return Shard(last)
    if weight.is_shard(1) and x.is_shard(last):
        return Partial()
    raise ValueError(f"linear: no rule for {x} and {weight}")


def zigzag_order(size: int, ranks: int) -> Tensor:
    """The positions of a sequence in the order in which ranks have them: of 2n chunks, rank r has r and 2n − 1 − r."""
    chunks = torch.arange(size).chunk(2 * ranks if ranks > 1 else 1)
    pairs = [(chunks[rank], chunks[-1 - rank]) for rank in range(ranks)] if ranks > 1 else [chunks]
    return torch.cat([chunk for pair in pairs for chunk in pair])


def recomputed(layer: nn.Module, *args: Any, enabled: bool = True) -> Any:
    """A layer of which backward recomputes all but the arguments."""
    return checkpoint(layer, *args, use_reentrant=False) if enabled else layer(*args)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the weight's dims."""
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the weight's dims."""
    return nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def mean_square(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x² / size over some dims."""
    return x.to(wide(x)).square().sum(dim) / size


def rms_scaled(x: Tensor, weight: Tensor, square: Tensor, eps: float) -> Tensor:
    """x / sqrt(square + eps) · weight, where `square` is the mean of x² over the weight's dims."""
    root = (square + eps).rsqrt()
    for _ in weight.shape:
        root = root.unsqueeze(-1)
    return (x * root * weight).to(x.dtype)


def mean(x: Tensor, dim: int | tuple[int, ...], size: int) -> Tensor:
    """Σ x / size over some dims."""
    return (x.sum(dim, dtype=wide(x)) / size).to(x.dtype)


def concat(*tensors: Tensor) -> Tensor:
    """Tensors concatenated along their last dims, and repeated along others in which they have size 1."""
    before: torch.Size = cast(Any, torch).broadcast_shapes(*(x.shape[:-1] for x in tensors))
    return torch.cat([x.expand(*before, x.shape[-1]) for x in tensors], dim=-1)


def split(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Consecutive slices of the last dim."""
    return x.split_with_sizes(sizes, dim=-1)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table`.  DTensor's own rule masks rows elsewhere on one axis of a mesh, and not on two."""
    pairs = zip(cast(DTensor, tokens).placements, cast(DTensor, table).placements, strict=True)
    places = [Partial() if of.is_shard(0) else Shard(tokens.ndim) if of.is_shard(1) else own for own, of in pairs]
    return on_each_rank(own_rows, places, tokens, table, counted(table, 0))


def own_rows(tokens: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """The rows that this rank has of a table, and zeros for the others."""
    local = tokens - rows[0]
    outside = (local < 0) | (local >= len(rows))
    found = nn.functional.embedding(local.masked_fill(outside, 0), table)
    return found.masked_fill(outside.unsqueeze(-1), 0)


def cross_entropy(
    logits: Tensor, labels: Tensor, classes: int | None = None, smoothing: float = 0.0, z: float = 0.0
) -> Tensor:
    """The sum of token losses; labels < 0 are ignored, columns from `classes` on are padding."""
    peak = max_logit(logits, classes)
    parts = local_softmax_stats(logits, peak, labels, classes, smoothing)
    return token_loss(*parts, labels, peak if z else None, z)


def max_logit(logits: Tensor, classes: int | None = None) -> Tensor:
    """The largest logit, without gradient: Partial("max") over an axis that shards the vocabulary."""
    logits = logits.detach()
    if classes is not None:
        logits = torch.where(counted(logits, -1) < classes, logits, -torch.inf)
    return logits.amax(-1).to(wide(logits))


def local_softmax_stats(
    logits: Tensor, m: Tensor, labels: Tensor, classes: int | None = None, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Σ exp(logit − m), and the label's logit − m: Partial over an axis that shards the vocabulary.

    With `smoothing` s the second is (1 − s) of that and s of Σ (logit − m) / classes.
    """
    below, column = logits.to(m.dtype) - m.unsqueeze(-1), counted(logits, -1)
    if classes is not None:
        below = torch.where(column < classes, below, -torch.inf)
    t = torch.where(labels.unsqueeze(-1) == column, below, 0.0).sum(-1)
    if smoothing:
        every = logits.shape[-1] if classes is None else classes
        t = (1 - smoothing) * t + smoothing / every * torch.where(column < every, below, 0.0).sum(-1)
    return below.exp().sum(-1), t


def token_loss(z: Tensor, t: Tensor, labels: Tensor, m: Tensor | None = None, z_loss: float = 0.0) -> Tensor:
    """Σ log z − t over tokens with label ≥ 0; with m, z_loss · (log z + m)² is added."""
    log = z.log()
    loss = log - t if m is None else log - t + z_loss * (log + m).square()
    return torch.where(labels >= 0, loss, 0.0).sum()


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which sums are kept: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
