"""Llama on 8 ranks: pipeline parallel 2 × data parallel 2 × tensor parallel 2, in torch alone.

Written by scalec 0.2.0 from tiny.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=8 train.py FILE [STEPS]

From another program: `from train import build, microbatches, train_step`.  Shapes in comments are one rank's:

    v vocab 32, h hidden 16, n heads 4, k kv_heads 2, d head_dim 4, f ffn 24, layers 4, s seq 8,
    b batch 2 per rank
    v/tp    the part of v that a rank of tp holds
    I, R    on an axis: the same on all ranks, invariant or replicated; S(dim) sharded, P partial
    P→I     a change of placement; bwd: what backward does for it

Shown: this file matches the IR, op for op.
Not shown: that torch communicates no more than the plan.
Parameters and activations are DTensors; each coercion of the plan is a `redistribute`.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import silu

VOCAB, HIDDEN, HEADS, HEAD_DIM, KV_HEADS, FFN, SEQ = 32, 16, 4, 4, 2, 24, 8
FIRST, LAST = 0, 3  # stages
MESH = {"pp": 2, "dp": 2, "tp": 2}
GLOBAL_BATCH, MICROBATCHES, STEPS, SEED = 16, 4, 10, 3

LAYERS_OF_STAGE = {  # by repeat: the layers of stage 0, of stage 1, …
    "layers": (range(0, 1), range(1, 2), range(2, 3), range(3, 4)),
}
STAGE_TO_RANK = (0, 1, 1, 0)
INNER = ("dp", "tp")  # the axes of DTensors


class Metrics(NamedTuple):
    """The mean loss of a step's labels, the norm of its gradients, the number of its labels."""

    loss: Tensor
    norm: Tensor
    tokens: int


class Layer(nn.Module):
    """A layer, of 4.  x: [s/tp, b, h]"""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm1 = weight(mesh, HIDDEN, placements=[Replicate(), Replicate()], mean=1.0)  # [h]
        self.wq = weight(mesh, HEADS * HEAD_DIM, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)  # [n/tp*d, h]
        # [k/tp*d, h]
        self.wk = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)
        # [k/tp*d, h]
        self.wv = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)
        self.wo = weight(mesh, HIDDEN, HEADS * HEAD_DIM, placements=[Replicate(), Shard(1)], std=0.02)  # [h, n/tp*d]
        self.norm2 = weight(mesh, HIDDEN, placements=[Replicate(), Replicate()], mean=1.0)  # [h]
        self.w_gate = weight(mesh, FFN, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)  # [f/tp, h]
        self.w_up = weight(mesh, FFN, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)  # [f/tp, h]
        self.w_down = weight(mesh, HIDDEN, FFN, placements=[Replicate(), Shard(1)], std=0.02)  # [h, f/tp]

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        a = rms_norm(x, self.norm1, eps=1e-5)  # [s/tp, b, h]  tiny.scale:9
        # [s, b, h]  S(seq)→R  bwd: reduce_scatter  tiny.scale:10
        a = a.redistribute(placements=[Shard(1), Replicate()])
        q = rope(linear(a, self.wq).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [s, b, n/tp, d]  tiny.scale:10
        k = rope(linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [s, b, k/tp, d]  tiny.scale:11
        v = linear(a, self.wv).unflatten(-1, (-1, HEAD_DIM))  # [s, b, k/tp, d]  tiny.scale:12
        y = linear(attention(q, k, v, layout="sbhd").flatten(-2), self.wo)  # [s, b, h] partial over tp  tiny.scale:14
        # [s/tp, b, h]  P→S(seq)  bwd: all_gather  tiny.scale:14
        x = x + y.redistribute(placements=[Shard(1), Shard(0)])
        m = rms_norm(x, self.norm2, eps=1e-5)  # [s/tp, b, h]  tiny.scale:15
        # [s, b, h]  S(seq)→R  bwd: reduce_scatter  tiny.scale:16
        m = m.redistribute(placements=[Shard(1), Replicate()])
        # [s, b, h] partial over tp  tiny.scale:16
        y = linear(silu(linear(m, self.w_gate)) * linear(m, self.w_up), self.w_down)
        # [s/tp, b, h]  P→S(seq)  bwd: all_gather  tiny.scale:16
        return x + y.redistribute(placements=[Shard(1), Shard(0)])


class Llama(nn.Module):
    """A rank's stages of Llama; the forward of the last one returns the summed token loss of a microbatch.

    tokens: [s, b], labels: [s, b]
    """

    def __init__(self, mesh: DeviceMesh, stage: int) -> None:
        super().__init__()
        self.wte = weight(mesh, VOCAB, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)  # [v/tp, h]
        self.layers = stage_layers(lambda: Layer(mesh), 4, LAYERS_OF_STAGE["layers"][stage])
        self.norm = weight(mesh, HIDDEN, placements=[Replicate(), Replicate()], mean=1.0)  # [h]
        self.head = weight(mesh, VOCAB, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)  # [v/tp, h]
        if stage != FIRST:
            del self.wte
        if stage != LAST:
            del self.norm, self.head
        rotary = rope_frequencies(
            mesh, SEQ, HEAD_DIM, theta=10_000, seq_dim=-4, dtype=torch.float64, placements=[Replicate(), Replicate()]
        )
        self.register_buffer("rotary", rotary, persistent=False)
        self.stage = stage

    def forward(self, *received: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.stage == FIRST:
            x = embedding(tokens, self.wte)  # [s, b, h] partial over tp  tiny.scale:7
            x = x.redistribute(placements=[Shard(1), Shard(0)])  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  tiny.scale:8
        else:
            (x,) = received
        for i in LAYERS_OF_STAGE["layers"][self.stage]:
            x = self.layers[str(i)](x, self.rotary)  # tiny.scale:8
        if self.stage < LAST:
            return x
        n = rms_norm(x, self.norm, eps=1e-5)  # [s/tp, b, h]  tiny.scale:18
        # [s, b, h]  S(seq)→R  bwd: reduce_scatter  tiny.scale:18
        n = n.redistribute(placements=[Shard(1), Replicate()])
        logits = linear(n, self.head)  # [s, b, v/tp]  tiny.scale:18
        local_max = max_logit(logits)  # [s, b] maximal over tp  tiny.scale:18
        # [s, b]  M→R  no gradient  tiny.scale:18
        logits_max = local_max.redistribute(placements=[Shard(1), Replicate()])
        sum_exp, label_logit = local_softmax_stats(logits, logits_max, labels)  # [s, b] partial over tp  tiny.scale:18
        sum_exp = sum_exp.redistribute(placements=[Shard(1), Replicate()])  # [s, b]  P→I  bwd: none  tiny.scale:18
        # [s, b]  P→I  bwd: none  tiny.scale:18
        label_logit = label_logit.redistribute(placements=[Shard(1), Replicate()])
        return token_loss(sum_exp, label_logit, labels)  # [] partial over dp  tiny.scale:18


def crossing(mesh: DeviceMesh, stage: int) -> list[tuple[Tensor, Tensor | None]]:
    """Examples of the values that cross from a stage to the next, and of their gradients."""
    return [
        example(
            mesh,
            SEQ,
            4,
            HIDDEN,
            dtype=torch.float64,
            placements=[Shard(1), Shard(0)],
            gradient=[Shard(1), Shard(0)],
        ),
    ]


def build(mesh: DeviceMesh) -> tuple["Pipeline", torch.optim.Optimizer]:
    """The model, its parameters DTensors on `mesh`, and its optimizer."""
    inner = mesh[INNER]
    own = [stage for stage, rank in enumerate(STAGE_TO_RANK) if rank == mesh.get_local_rank("pp")]
    stages = [stage_module(partial(Llama, inner), stage).to(torch.float64) for stage in own]
    for module in stages:
        fully_shard(module, mesh=inner, reshard_after_forward=False, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        sum_gradients(module)
    parts = [
        pipeline_stage(module, stage, len(STAGE_TO_RANK), mesh, "pp", partial(crossing, inner))
        for module, stage in zip(stages, own, strict=True)
    ]
    model = Pipeline(
        mesh,
        "pp",
        parts,
        Path(__file__).with_name("schedule.csv"),
        MICROBATCHES,
        split={"tokens": 1, "labels": 1},
        shared={},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    return model, optimizer


def microbatches(mesh: DeviceMesh, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The model's inputs of all microbatches, of a global batch, [GLOBAL_BATCH, SEQ] each, that all ranks have."""
    mesh = mesh[INNER]
    return {
        "tokens": all_microbatches(
            by_microbatch(mesh, tokens, MICROBATCHES, [Shard(1), Replicate()], seq_first=True),
            dim=1,
        ),
        "labels": all_microbatches(
            by_microbatch(mesh, labels, MICROBATCHES, [Shard(1), Replicate()], seq_first=True),
            dim=1,
        ),
    }


def train_step(model: "Pipeline", optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    num_tokens = count_valid([batch["labels"]])
    loss = model.run(batch, num_tokens, backward=True)
    gradients = model.gradients()
    grad_norm = model.total_norm(gradients)
    if num_tokens and loss.isfinite() and grad_norm.isfinite():  # or else the step changes nothing
        update(optimizer, lr)
    optimizer.zero_grad()
    return Metrics(loss, grad_norm, num_tokens)


@torch.no_grad()
def eval_step(model: "Pipeline", batch: Mapping[str, Tensor]) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    num_tokens = count_valid([batch["labels"]])
    loss = model.run(batch, num_tokens, backward=False)
    return Metrics(loss, torch.zeros_like(loss), num_tokens)


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Writes parameters and optimizer state as safetensors, each rank its own part; `scalec convert` reads these."""
    dcp.save(training_state(model, optimizer), storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Reads them, on any mesh: those that `save_checkpoint` or `scalec convert` has written."""
    dcp.load(training_state(model, optimizer), storage_reader=HuggingFaceStorageReader(folder))


# ---- ops


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the weight's dims."""
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


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

    `seq_dim` is the dim of the sequence in the tensors to rotate, counted from their end: for -4 the table is
    [2, seq, 1, 1, dim].
    """
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling != "none":
        turns = original * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1) if scaling == "llama3" else torch.zeros_like(turns)
        if scaling == "yarn":
            often, seldom = (dim / 2 * math.log(original / (2 * math.pi * each), theta) for each in (high, low))
            first, last = max(math.floor(often), 0), min(math.ceil(seldom), dim - 1)
            pairs = torch.arange(dim // 2, dtype=torch.float64)
            kept = 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = zigzag_order(seq, zigzag).double().outer(frequency)
    table = torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], dim=1)])
    return placed(table.to(dtype).view(2, seq, *[1] * (-2 - seq_dim), dim), mesh, placements)


def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotates (x[i], x[i + d/2]) of the last dim, or of its first d, by the angles of a table."""
    turned = table.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rope(x[..., :turned], table), x[..., turned:]], -1)
    cosine, sine = table.unbind()
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


class Scores(NamedTuple):
    """How queries see keys: both are numbered in the `order` that ranks have positions in.  documents: [batch, seq]."""

    order: Tensor
    documents: Tensor | None
    causal: bool
    window: int
    scale: float | None
    softcap: float

    def seen(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether queries see keys, [rows, columns]; [batch, 1, rows, columns] where there are documents."""
        ahead = self.order[rows].unsqueeze(1) - self.order[columns]
        seen = ahead >= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        seen = seen & (ahead.abs() < self.window) if self.window else seen
        if self.documents is None:
            return seen
        return seen & (self.documents[:, None, rows, None] == self.documents[:, None, None, columns])

    def __call__(self, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """cap(q·kᵀ · scale), −∞ where a key isn't seen: [batch, heads, rows, columns]."""
        scores = (q @ for_each_head(k, q).mT).to(wide(q)) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        scores = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        return scores.masked_fill(~self.seen(rows, columns), -torch.inf)


def for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of few heads, [batch, kv heads, seq, d], repeated for each head of the queries."""
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
    of = partial(Scores, causal=causal, window=window, scale=scale, softcap=softcap)
    operands = [q, k, v, counted(q, seq), *([] if documents is None else [documents])]
    attend = partial(attend_locally, seq=seq, of=of, zigzag=zigzag)
    return on_each_rank(attend, cast(DTensor, q).placements, *operands)


def attend_locally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    documents: Tensor | None = None,
    *,
    seq: int,
    of: Callable[..., Scores],
    zigzag: int,
) -> Tensor:
    """Attention of the queries that are number `rows` to all keys."""
    q, k, v = (x.movedim(seq, -2) for x in (q, k, v))
    of_rows = None if documents is None else documents.movedim(seq, -1)
    scores = of(zigzag_order(k.shape[-2], zigzag).to(k.device), of_rows)
    columns = torch.arange(k.shape[-2], device=k.device)
    if scores.softcap:
        return (scores(q, k, rows, columns).softmax(-1).to(v.dtype) @ for_each_head(v, q)).movedim(-2, seq)
    special = scores.window or documents is not None
    plain = scores.causal and not special and len(rows) == len(columns) and zigzag == 1
    mask = scores.seen(rows, columns) if special or (scores.causal and not plain) else None
    how: dict[str, Any] = {"is_causal": plain, "scale": scores.scale, "enable_gqa": q.shape[1] > k.shape[1]}
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, **how).movedim(-2, seq)


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


def reduced_gradients(model: nn.Module, dtype: torch.dtype | None = None) -> list[DTensor]:
    """All gradients, after the sums over ranks that they still are: P→I in `dtype`, an all_reduce for each."""
    for parameter in model.parameters():
        gradient, placements = cast(DTensor, parameter.grad), cast(DTensor, parameter.data).placements
        if gradient.placements != placements:
            sent = cast(DTensor, gradient.to(dtype or gradient.dtype))
            parameter.grad = sent.redistribute(placements=placements).to(gradient.dtype)
    return [cast(DTensor, parameter.grad) for parameter in model.parameters()]


def total_norm(gradients: Sequence[DTensor]) -> Tensor:
    """The norm of all gradients: one sum over ranks for those of the same placements."""
    alike: dict[tuple[Placement, ...], list[Tensor]] = {}
    for each in gradients:
        alike.setdefault(tuple(each.placements), []).append(each.to(wide(each)).square().sum())
    return torch.stack([whole_sum(each) for each in alike.values()]).sum().sqrt()


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters by name, and the tensors of the optimizer's state, which is made if there is none: to save or fill."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    kept = get_optimizer_state_dict(model, optimizer, options=options)
    state = {f"optimizer.{key}": value for key, value in kept.items() if isinstance(value, Tensor)}
    return {**get_model_state_dict(model), **state}


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """An update with the learning rate of a step, of which groups may have a share each."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    optimizer.step()


class Pipeline(nn.Module):
    """A rank's stages under the names of the whole model, and the schedules that run them.

    `rows` is a file with each rank's actions, as torch.distributed.pipelining reads them; evaluation runs its
    forwards.  `shared` has the ranks, on the pipeline's axis, of each parameter that several of them hold.
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
            self.take(cast(nn.Module, stage.submod))
        of_input = {name: TensorChunkSpec(dim) for name, dim in split.items()}
        options: dict[str, Any] = {"kwargs_chunk_spec": of_input, "loss_fn": mean_loss, "scale_grads": False}
        schedules = [_PipelineScheduleRuntime([*stages], microbatches, **options) for _ in range(2)]
        self.forwards, self.schedule = schedules
        self.schedule._load_csv(str(rows), format="compute_comms")
        self.forwards.pipeline_order_with_comms = forwards_of(self.schedule.pipeline_order_with_comms)
        self.count = microbatches
        self.group, rank = mesh.get_group(axis), mesh.get_local_rank(axis)
        self.groups = {name: ranks_along(mesh, axis, ranks) for name, ranks in shared.items()}
        self.counted_elsewhere = {name for name, (first, *_) in shared.items() if first != rank}

    def take(self, stage: nn.Module) -> None:
        """Has a stage's parameters and layers too; layers keep the numbers that they have in the whole model."""
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
        """Forward, and perhaps backward, of all microbatches; the mean loss of `num_tokens` labels, on all ranks."""
        losses: list[Tensor] = []
        step: Callable[..., object] = self.schedule.step if backward else self.forwards.eval
        each = torch.full((self.count,), num_tokens or 1)
        step(**batch, target=each, losses=losses, return_outputs=False)
        if losses:
            return self.whole(whole_sum([loss.detach() for loss in losses]))
        param = next(self.parameters())
        return self.whole(torch.zeros((), dtype=wide(param), device=param.device))

    def gradients(self, dtype: torch.dtype | None = None) -> list[DTensor]:
        """All gradients after the sums that they still are, over ranks and over the stages that share a parameter."""
        found = reduced_gradients(self, dtype)
        for (name, _), gradient in zip(self.named_parameters(), found, strict=True):
            if name in self.groups:
                dist.all_reduce(gradient.to_local(), group=self.groups[name])
        return found

    def total_norm(self, gradients: Sequence[DTensor]) -> Tensor:
        """The norm of all stages' gradients; those that several ranks hold count once."""
        pairs = zip(self.named_parameters(), gradients, strict=True)
        own = [gradient for (name, _), gradient in pairs if name not in self.counted_elsewhere]
        return self.whole(total_norm(own).square()).sqrt()

    def whole(self, part: Tensor) -> Tensor:
        """The sum of all stages' parts."""
        dist.all_reduce(part, group=self.group)
        return part


def mean_loss(loss_sum: Tensor, num_tokens: Tensor) -> Tensor:
    """The part that a microbatch has of the mean loss; a schedule gives each its entry of `target`."""
    return loss_sum / num_tokens.item()


def forwards_of(rows: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """The actions of evaluation: forwards, what they send and receive, and gathered parameters."""
    return {rank: [each for each in row if re.search("F|SHARD", str(each))] for rank, row in rows.items()}


def ranks_along(mesh: DeviceMesh, axis: str, places: Sequence[int]) -> dist.ProcessGroup:
    """The group of some ranks of a mesh axis, each beside the ranks that differ from this one on no other axis."""
    names = cast(tuple[str, ...], mesh.mesh_dim_names)
    each = mesh.mesh.movedim(names.index(axis), -1).reshape(-1, mesh.size(names.index(axis)))[:, [*places]]
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(each.tolist())[0])


def pipeline_stage(
    module: nn.Module,
    stage: int,
    stages: int,
    mesh: DeviceMesh,
    axis: str,
    crossing: Callable[[int], Sequence[tuple[Tensor, Tensor | None]]],
) -> PipelineStage:
    """A stage; `crossing` gives examples of the values, and of their gradients, that cross after one."""
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
    """A value of a global shape, and its gradient if it has one: `PipelineStage` reads shapes and placements."""
    make = partial(empty, sizes, dtype=dtype, device_mesh=mesh)
    value = make(placements=placements, requires_grad=gradient is not None)
    return value, None if gradient is None else make(placements=gradient)


def stage_module(make: Callable[[int], nn.Module], stage: int) -> nn.Module:
    """The module of a stage; all stages draw the same random values, of which each keeps its own."""
    with torch.random.fork_rng():
        return make(stage)


def stage_layers(layer: Callable[[], nn.Module], count: int, own: range) -> nn.ModuleDict:
    """A stage's own layers by number.  All are made, so that random values are those of any mesh."""
    return nn.ModuleDict({str(i): made for i, made in ((i, layer()) for i in range(count)) if i in own})


def all_microbatches(each: Sequence[Tensor], dim: int) -> DTensor:
    """Microbatches as one DTensor, of which a schedule splits each rank's part."""
    first = cast(DTensor, each[0])
    local = torch.cat([cast(DTensor, part).to_local() for part in each], dim)
    return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False)


# ---- a run


def main() -> None:
    """Trains on random windows of a file's bytes; `torchrun … train.py FILE [STEPS]`."""
    ranks = math.prod(MESH.values())
    if os.environ.get("WORLD_SIZE") != str(ranks) or len(sys.argv) < 2:
        sys.exit(f"error: torchrun starts this, with a world size of {ranks}, on a FILE: see the first lines")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (*MESH.values(),), mesh_dim_names=(*MESH,))
    torch.manual_seed(SEED)
    model, optimizer = build(mesh)
    text = torch.frombuffer(bytearray(Path(sys.argv[1]).read_bytes()), dtype=torch.uint8).long()
    steps = int(sys.argv[2]) if sys.argv[2:] else STEPS
    for step in range(steps):
        begins = torch.randint(len(text) - SEQ, (GLOBAL_BATCH, 1))
        rows = text[begins + torch.arange(SEQ + 1)]
        batch = microbatches(mesh, rows[:, :-1], rows[:, 1:])
        metrics = train_step(model, optimizer, batch, learning_rate(step, steps))
        if dist.get_rank() == 0:
            print(f"step {step}  loss {metrics.loss:.4f}  norm {metrics.norm:.3f}", flush=True)
    dist.destroy_process_group()


def learning_rate(step: int, steps: int) -> float:
    """The learning rate of a step, from 0: cosine, after a warm-up."""
    if step < 2:
        return 0.01 * (step + 1) / 2
    done = (step - 2) / max(1, steps - 1 - 2)
    return 1e-3 + (0.01 - 1e-3) * 0.5 * (1 + math.cos(math.pi * done))


if __name__ == "__main__":
    main()
