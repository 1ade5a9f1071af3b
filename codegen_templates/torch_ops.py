"""Ops on DTensors for programs of torch alone; such a program holds the source of those that it calls.

Shapes are global.  DTensor finds the placements of results, which are those of the IR; only products, tables and
attention are called on local tensors, since it has no good rule for them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
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


def on_each_rank(function: Callable[..., Tensor], placements: Sequence[Placement], *operands: Tensor) -> Tensor:
    """A function of the operands' parts, with a result placed so; for functions that DTensor has no good rule for.

    On an axis that shards some operand, the gradients of those that it replicates are sums over ranks.
    """
    places = [cast(DTensor, each).placements for each in operands]
    split = [any(not each.is_replicate() for each in axis) for axis in zip(*places, strict=True)]
    duals = [[dual(place, cut) for place, cut in zip(each, split, strict=True)] for each in places]
    mesh = cast(DTensor, operands[0]).device_mesh
    return cast(Tensor, local_map(function, [*placements], (*places,), (*duals,), mesh)(*operands))


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


def rope_frequencies(
    mesh: DeviceMesh,
    seq: int,
    dim: int,
    theta: float,
    between: int,
    placements: Sequence[Placement],
    dtype: torch.dtype = torch.float32,
    scaling: str = "none",
    factor: float = 1.0,
    low: float = 1.0,
    high: float = 4.0,
    original: float = 8192.0,
    zigzag: int = 1,
) -> Tensor:
    """Cosines and signed sines of rotary positions, [2, seq, 1 × between, dim], for `rope`."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling != "none":
        turns = original * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1) if scaling == "llama3" else torch.zeros_like(turns)
        if scaling == "yarn":
            often, seldom = (dim / 2 * math.log(original / (2 * math.pi * each), theta) for each in (high, low))
            first, last = max(math.floor(often), 0), min(math.ceil(seldom), dim - 1)
            kept = 1 - ((torch.arange(dim // 2) - first) / max(last - first, 1e-3)).clamp(0, 1).double()
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = zigzag_order(seq, zigzag).double().outer(frequency)
    table = torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], dim=1)])
    return placed(table.to(dtype).view(2, seq, *(1 for _ in range(between)), dim), mesh, placements)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotates (x[i], x[i + d/2]) of the last dim, or of its first d, by the angles of a table."""
    turned = table.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rope(x[..., :turned], table), x[..., turned:]], -1)
    cosine, sine = table.unbind()
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


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
    how: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "zigzag": zigzag}
    attend = partial(attend_locally, seq=seq, **how)
    operands = [q, k, v, counted(q, seq), *([] if documents is None else [documents])]
    return on_each_rank(attend, cast(DTensor, q).placements, *operands)


def attend_locally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    documents: Tensor | None = None,
    *,
    seq: int,
    causal: bool,
    window: int,
    scale: float | None,
    softcap: float,
    zigzag: int,
) -> Tensor:
    """Attention of the queries that are number `rows` to all keys."""
    q, k, v = (x.movedim(seq, -2) for x in (q, k, v))
    keys, groups = zigzag_order(k.shape[-2], zigzag).to(k.device), q.shape[1] // k.shape[1]
    ahead = keys[rows].unsqueeze(1) - keys
    seen = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    seen = seen & (ahead.abs() < window) if window else seen
    if documents is not None:
        whole = documents.movedim(seq, -1)
        seen = seen & (whole[:, rows].unsqueeze(2) == whole.unsqueeze(1)).unsqueeze(1)
    if not softcap:
        plain = causal and not window and documents is None and len(rows) == len(keys) and zigzag == 1
        mask = None if plain or not (causal or window or documents is not None) else seen
        how: dict[str, Any] = {"is_causal": plain, "scale": scale, "enable_gqa": groups > 1}
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, **how).movedim(-2, seq)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT).to(wide(q)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).to(v.dtype) @ v).movedim(-2, seq)


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


def count_valid(labels: Sequence[Tensor]) -> int:
    """The number of labels ≥ 0 on all ranks: one all_reduce."""
    return int(whole_sum([(each >= 0).sum() for each in labels]))


def whole_sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of DTensors of the same placements, whole on each rank."""
    return cast(DTensor, reduce(torch.add, terms)).full_tensor()


def sum_gradients(module: nn.Module) -> None:
    """Has FSDP2 add up gradients over ranks: a step divides them by its labels, not by its ranks."""
    sharded = cast(FSDPModule, module)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(enable=True)  # else one that gloo does not have


def each_module(modules: Iterable[nn.Module], reduce_now: bool, free: bool) -> None:
    """Says of modules whether the next backward reduces their gradients, and frees their gathered parameters."""
    for module in modules:
        module = cast(FSDPModule, module)
        module.set_requires_gradient_sync(reduce_now, recurse=False)
        module.set_reshard_after_backward(free, recurse=False)


def param_group(model: nn.Module, *patterns: str, weight_decay: float, lr_scale: float = 1.0) -> dict[str, Any]:
    """The parameters whose names fit a pattern, with the settings that they share."""
    fits = re.compile("|".join(each.replace(".", r"\.").replace("*", r"\d+") for each in patterns))
    params = [param for name, param in model.named_parameters() if fits.fullmatch(name)]
    return {"params": params, "weight_decay": weight_decay, "lr_scale": lr_scale}


def reduced_gradients(model: nn.Module) -> list[DTensor]:
    """All gradients, after the sums over ranks that they still are: P→I, an all_reduce for each parameter."""
    for parameter in model.parameters():
        gradient, placements = cast(DTensor, parameter.grad), cast(DTensor, parameter.data).placements
        parameter.grad = gradient.redistribute(placements=placements)
    return [cast(DTensor, parameter.grad) for parameter in model.parameters()]


def total_norm(gradients: Sequence[DTensor]) -> Tensor:
    """The norm of all gradients: one sum over ranks for those of the same placements."""
    alike: dict[tuple[Placement, ...], list[Tensor]] = {}
    for each in gradients:
        alike.setdefault(tuple(each.placements), []).append(each.to(wide(each)).square().sum())
    return torch.stack([whole_sum(each) for each in alike.values()]).sum().sqrt()


def by_file_names(model: nn.Module, names: Mapping[str, str]) -> dict[str, Any]:
    """A model's parameters by the names that files have for them."""
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        layer = re.search(r"\.(\d+)\.", name)
        tensor = names[re.sub(r"\.\d+\.", ".*.", name)]
        found[tensor.format(i=layer[1]) if layer else tensor] = value
    return found


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """An update with the learning rate of a step, of which groups may have a share each."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    optimizer.step()
