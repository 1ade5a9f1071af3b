"""llama on 2 ranks: dp 2 × tp 1.

Written by scalec 0.1.0 from shared_state.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=2 train.py

and options [--steps N] [--lr X] [--data GLOB ...] [--resume], of which --help says more.

Shapes in comments are one rank's: v vocab 256, h hidden 64, n heads 4, k kv_heads 2, d head_dim 16, f ffn 192,
layers 2, s seq 128, b batch 8 per rank.  On an axis a value is I invariant, R replicated, S(dim) sharded or P
partial; P→I is a change of placement, and bwd what backward does for it.

Shown: the IR's step evaluated equal to the single-device step of the model before any placement (loss, gradient
norm, count of labels, 12 gradients and 12 updated parameters; on dp 2 × tp 1 and dp 3 × tp 1 at small sizes, in
integers modulo 2147483579, 6 trials, error below 2^-89), and this file matches the IR, op for op.  Not shown:
rounding, kernels, the network; run time is tested by scalec's own suite on gloo, and for this program by
SCALEC_RECORD=1 and SCALEC_SANITIZE=1.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from scalec.runtime import (
    Account,
    AdamW,
    Batch,
    Bucket,
    Cosine,
    HFNames,
    HFWeight,
    Input,
    Mesh,
    Metrics,
    ParamGroup,
    Plan,
    Text,
    TrainState,
    all_gather_,
    all_reduce_,
    attention,
    clip_scale,
    count_valid,
    cross_entropy,
    embedding,
    normal,
    ones,
    reduce_scatter_,
    rms_norm,
    rope,
    rope_frequencies,
    sum_squares,
    train,
    weight,
)


class Layer(nn.Module):
    """One of 2 layers.  x: [b, s, h]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm1 = weight(mesh, 64, init=ones())  # [h]
        self.wq = weight(mesh, 64, 64, init=normal(0.02))  # [n*d, h]
        self.wk = weight(mesh, 32, 64, init=normal(0.02))  # [k*d, h]
        self.wv = weight(mesh, 32, 64, init=normal(0.02))  # [k*d, h]
        self.wo = weight(mesh, 64, 64, init=normal(0.02))  # [h, n*d]
        self.norm2 = weight(mesh, 64, init=ones())  # [h]
        self.w_gate = weight(mesh, 192, 64, init=normal(0.02))  # [f, h]
        self.w_up = weight(mesh, 192, 64, init=normal(0.02))  # [f, h]
        self.w_down = weight(mesh, 64, 192, init=normal(0.02))  # [h, f]

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        a = rms_norm(x, self.norm1, eps=1e-5)  # [b, s, h]  llama.scale:21
        q = rope(linear(a, self.wq).unflatten(-1, (4, 16)), rotary)  # [b, s, n, d]  llama.scale:22
        k = rope(linear(a, self.wk).unflatten(-1, (2, 16)), rotary)  # [b, s, k, d]  llama.scale:23
        v = linear(a, self.wv).unflatten(-1, (2, 16))  # [b, s, k, d]  llama.scale:24
        x = x + linear(attention(q, k, v, seq=1).flatten(-2), self.wo)  # [b, s, h]  llama.scale:25
        m = rms_norm(x, self.norm2, eps=1e-5)  # [b, s, h]  llama.scale:27
        x = x + linear(silu(linear(m, self.w_gate)) * linear(m, self.w_up), self.w_down)  # [b, s, h]  llama.scale:28
        return x


class Llama(nn.Module):
    """The sum of token losses of this rank's part of a microbatch.  tokens: [b, s], labels: [b, s]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.wte = weight(mesh, 256, 64, init=normal(0.02))  # [v, h]
        self.norm = weight(mesh, 64, init=ones())  # [h]
        self.head = weight(mesh, 256, 64, init=normal(0.02))  # [v, h]
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(2))
        rotary = rope_frequencies(128, 16, theta=500_000, between=1, mesh=mesh, dtype=torch.bfloat16)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = embedding(tokens, self.wte)  # [b, s, h]  llama.scale:19
        for layer in self.layers:
            x = layer(x, self.rotary)  # llama.scale:20
        # [] partial over dp  llama.scale:30
        loss = cross_entropy(linear(rms_norm(x, self.norm, eps=1e-5), self.head), labels)
        return loss


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """The model, and its parameters, gradients and optimizer state in a flat bucket for each placement."""
    model = Llama(mesh)
    buckets = {
        "dp": Bucket(
            ParamGroup(
                "wte",
                "layers.*.norm1",
                "layers.*.wq",
                "layers.*.wk",
                "layers.*.wv",
                "layers.*.wo",
                "layers.*.norm2",
                "layers.*.w_gate",
                "layers.*.w_up",
                "layers.*.w_down",
                "norm",
                "head",
                weight_decay=0.1,
            ),
            shard_axes=("dp",),
        ),
    }
    optimizer = AdamW(betas=(0.9, 0.95), eps=1e-8)
    return model, TrainState(model, mesh, buckets, optimizer, dtype=torch.bfloat16, master=torch.float32)


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # labels of the step that count
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    weights = state.weights()
    all_gather_(weights["dp"], dp)  # S→R  131,712 × bf16
    for tokens, labels in batch.microbatches():
        loss_sum = model(tokens, labels)
        (loss_sum * inv_num_tokens).backward()
        loss += loss_sum.detach()
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()
    gradients["dp"] = reduce_scatter_(gradients["dp"], dp)  # P→S  65,856 × f32
    grad_norm = all_reduce_(sum_squares(gradients["dp"]), dp).sqrt()
    state.update(lr, scale=clip_scale(grad_norm, 1.0), skip=num_tokens == 0)
    return Metrics(loss=loss, norm=grad_norm, tokens=num_tokens)


@torch.no_grad()
def eval_step(model: nn.Module, state: TrainState, batch: Batch) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # labels of the step that count
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    weights = state.weights()
    all_gather_(weights["dp"], dp)  # S→R  131,712 × bf16
    for tokens, labels in batch.microbatches():
        loss += model(tokens, labels)
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    return Metrics(loss=loss, tokens=num_tokens)


PLAN = Plan(
    name="shared_state",
    mesh={"dp": 2, "tp": 1},
    data=Text(("python_stdlib",), holdout=0.05),
    inputs={
        "tokens": Input(("batch", "seq"), {"batch": ("dp",)}),
        "labels": Input(("batch", "seq"), {"batch": ("dp",)}),
    },
    vocab=256,
    seq=128,
    global_batch=32,
    microbatches=2,
    steps=240,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    account=Account("cpu", (12037644,)),
    model="d68821ee93ce",  # what is computed, on any mesh
    names=HFNames(
        torch.bfloat16,
        {
            "wte": HFWeight("model.embed_tokens.weight", (256, 64)),
            "layers.*.norm1": HFWeight("model.layers.{i}.input_layernorm.weight", (64,)),
            "layers.*.wq": HFWeight("model.layers.{i}.self_attn.q_proj.weight", (64, 64)),
            "layers.*.wk": HFWeight("model.layers.{i}.self_attn.k_proj.weight", (32, 64)),
            "layers.*.wv": HFWeight("model.layers.{i}.self_attn.v_proj.weight", (32, 64)),
            "layers.*.wo": HFWeight("model.layers.{i}.self_attn.o_proj.weight", (64, 64)),
            "layers.*.norm2": HFWeight("model.layers.{i}.post_attention_layernorm.weight", (64,)),
            "layers.*.w_gate": HFWeight("model.layers.{i}.mlp.gate_proj.weight", (192, 64)),
            "layers.*.w_up": HFWeight("model.layers.{i}.mlp.up_proj.weight", (192, 64)),
            "layers.*.w_down": HFWeight("model.layers.{i}.mlp.down_proj.weight", (64, 192)),
            "norm": HFWeight("model.norm.weight", (64,)),
            "head": HFWeight("lm_head.weight", (256, 64)),
        },
        repeats={"layers": 2},
    ),
)

if __name__ == "__main__":
    train(PLAN, build, train_step, eval_step)
