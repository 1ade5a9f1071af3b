"""Llama on 4 ranks: data parallel 2 × tensor parallel 2, in torch alone.

Written by scalec 0.2.0 from tiny.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=4 train.py FILE [STEPS]

From another program: `from train import build, microbatches, train_step`; torch_ops.py saves and loads state.

Shapes in comments are one rank's:

    v vocab 32, h hidden 16, n heads 4, k kv_heads 2, d head_dim 4, f ffn 24, layers 2, s seq 8,
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
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import silu

try:
    from torch_ops import (
        Metrics,
        attention,
        by_microbatch,
        count_valid,
        embedding,
        linear,
        local_softmax_stats,
        max_logit,
        random_windows,
        read_bytes,
        reduced_gradients,
        rms_norm,
        rope,
        rope_frequencies,
        start_run,
        token_loss,
        total_norm,
        update,
        weight,
        whole_sum,
    )
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: copy torch_ops.py beside this file, or compile the plan again")

VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM, KV_HEADS, FFN, SEQ = 32, 16, 2, 4, 4, 2, 24, 8
MESH = {"dp": 2, "tp": 2}
GLOBAL_BATCH, MICROBATCHES, STEPS, SEED = 8, 2, 10, 3


class Layer(nn.Module):
    """A layer, of 2.  x: [s/tp, b, h]"""

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
    """Llama; forward returns the summed token loss of a microbatch.  tokens: [s, b], labels: [s, b]"""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.wte = weight(mesh, VOCAB, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)  # [v/tp, h]
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(LAYERS))
        self.norm = weight(mesh, HIDDEN, placements=[Replicate(), Replicate()], mean=1.0)  # [h]
        self.head = weight(mesh, VOCAB, HIDDEN, placements=[Replicate(), Shard(0)], std=0.02)  # [v/tp, h]
        rotary = rope_frequencies(
            mesh, SEQ, HEAD_DIM, theta=10_000, seq_dim=-4, dtype=torch.float32, placements=[Replicate(), Replicate()]
        )
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = embedding(tokens, self.wte)  # [s, b, h] partial over tp  tiny.scale:7
        x = x.redistribute(placements=[Shard(1), Shard(0)])  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  tiny.scale:8
        for layer in self.layers:
            x = layer(x, self.rotary)  # tiny.scale:8
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


def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, its parameters DTensors on `mesh`, and its optimizer."""
    model = Llama(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    return model, optimizer


def microbatches(mesh: DeviceMesh, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, ...]]:
    """The model's inputs of each microbatch, of a global batch, [GLOBAL_BATCH, SEQ] each, that all ranks have."""
    inputs = (
        by_microbatch(mesh, tokens, MICROBATCHES, [Shard(1), Replicate()], seq_first=True),
        by_microbatch(mesh, labels, MICROBATCHES, [Shard(1), Replicate()], seq_first=True),
    )
    return list(zip(*inputs, strict=True))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[tuple[Tensor, ...]], lr: float
) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    num_tokens = count_valid([labels for _, labels in batch])
    losses: list[Tensor] = []
    for tokens, labels in batch:
        loss_sum = model(tokens, labels)
        (loss_sum / max(num_tokens, 1)).backward()
        losses.append(loss_sum.detach())
    loss = whole_sum(losses) / max(num_tokens, 1)
    gradients = reduced_gradients(model)
    grad_norm = total_norm(gradients)
    if num_tokens and loss.isfinite() and grad_norm.isfinite():  # or else the step changes nothing
        for gradient in gradients:
            gradient.mul_(min(1.0, 1.0 / (grad_norm.item() + 1e-6)))
        update(optimizer, lr)
    optimizer.zero_grad()
    return Metrics(loss, grad_norm, num_tokens)


@torch.no_grad()
def eval_step(model: nn.Module, batch: Sequence[tuple[Tensor, ...]]) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    num_tokens = count_valid([labels for _, labels in batch])
    loss = whole_sum([model(tokens, labels) for tokens, labels in batch]) / max(num_tokens, 1)
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
