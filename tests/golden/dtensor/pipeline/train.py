"""Llama on 8 ranks: pipeline parallel 2 × data parallel 2 × tensor parallel 2, in torch alone.

Written by scalec 0.2.0 from tiny.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=8 train.py FILE [STEPS]

From another program: `from train import build, microbatches, train_step`; torch_ops.py saves and loads state.

Shapes in comments are one rank's:

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
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import silu

try:
    from torch_ops import (
        Metrics,
        Pipeline,
        all_microbatches,
        attention,
        by_microbatch,
        count_valid,
        embedding,
        example,
        linear,
        local_softmax_stats,
        max_logit,
        pipeline_stage,
        random_windows,
        read_bytes,
        rms_norm,
        rope,
        rope_frequencies,
        stage_layers,
        stage_module,
        start_run,
        sum_gradients,
        token_loss,
        update,
        weight,
    )
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: copy torch_ops.py beside this file, or compile the plan again")

VOCAB, HIDDEN, HEADS, HEAD_DIM, KV_HEADS, FFN, SEQ = 32, 16, 4, 4, 2, 24, 8
FIRST, LAST = 0, 3  # stages
MESH = {"pp": 2, "dp": 2, "tp": 2}
GLOBAL_BATCH, MICROBATCHES, STEPS, SEED = 16, 4, 10, 3

LAYERS_OF_STAGE = {  # by repeat: the layers of stage 0, of stage 1, …
    "layers": (range(0, 1), range(1, 2), range(2, 3), range(3, 4)),
}
STAGE_TO_RANK = (0, 1, 1, 0)
INNER = ("dp", "tp")  # the axes of DTensors


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


def build(mesh: DeviceMesh) -> tuple[Pipeline, torch.optim.Optimizer]:
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


def train_step(model: Pipeline, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], lr: float) -> Metrics:
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
def eval_step(model: Pipeline, batch: Mapping[str, Tensor]) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    num_tokens = count_valid([batch["labels"]])
    loss = model.run(batch, num_tokens, backward=False)
    return Metrics(loss, torch.zeros_like(loss), num_tokens)


def learning_rate(step: int, steps: int) -> float:
    """The learning rate of a step, from 0: cosine, after a warm-up."""
    if step < 2:
        return 0.01 * (step + 1) / 2
    done = (step - 2) / max(1, steps - 1 - 2)
    return 1e-3 + (0.01 - 1e-3) * 0.5 * (1 + math.cos(math.pi * done))


def main() -> None:
    """Trains on random windows of a file's bytes; `torchrun … train.py FILE [STEPS]`."""
    mesh = start_run(MESH)
    torch.manual_seed(SEED)
    model, optimizer = build(mesh)
    tokens = read_bytes(sys.argv[1])
    steps = int(sys.argv[2]) if sys.argv[2:] else STEPS
    for step in range(steps):
        rows = random_windows(tokens, GLOBAL_BATCH, SEQ + 1)
        batch = microbatches(mesh, rows[:, :-1], rows[:, 1:])
        metrics = train_step(model, optimizer, batch, learning_rate(step, steps))
        if dist.get_rank() == 0:
            print(f"step {step}  loss {metrics.loss:.4f}  norm {metrics.norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
