"""llama on 4 ranks: dp 2 × tp 2.

Written by scalec 0.1.0 from tiny_llama.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=4 train.py

and options [--steps N] [--lr X] [--data GLOB ...] [--resume], of which --help says more.

Shapes in comments are one rank's: v vocab 256, h hidden 64, n heads 4, k kv_heads 2, d head_dim 16, f ffn 192,
layers 2, s seq 128, b batch 8 per rank; v/tp is the part of v that a rank of axis tp holds.  On an axis a value is
I invariant, R replicated, S(dim) sharded or P partial; P→I is a change of placement, and bwd what backward does for
it.

Shown: the IR's step evaluated equal to the single-device step of the model before any placement (loss, gradient
norm, count of labels, 12 gradients and 12 updated parameters; on dp 2 × tp 3 and dp 3 × tp 2 at small sizes, in
integers modulo 2147483579, 6 trials, error below 2^-86), and this file matches the IR, op for op.  Not shown:
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
    all_gather,
    all_reduce,
    all_reduce_,
    attention,
    clip_scale,
    count_valid,
    embedding,
    local_softmax_stats,
    max_logit,
    normal,
    ones,
    reduce_scatter,
    rms_norm,
    rope,
    rope_frequencies,
    sum_squares,
    token_loss,
    train,
    weight,
)


class Layer(nn.Module):
    """One of 2 layers.  x: [s/tp, b, h]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        self.norm1 = weight(mesh, 64, init=ones())  # [h]
        self.wq = weight(mesh, 64, 64, shard={0: "tp"}, init=normal(0.02))  # [n/tp*d, h]
        self.wk = weight(mesh, 32, 64, shard={0: "tp"}, init=normal(0.02))  # [k/tp*d, h]
        self.wv = weight(mesh, 32, 64, shard={0: "tp"}, init=normal(0.02))  # [k/tp*d, h]
        self.wo = weight(mesh, 64, 64, shard={1: "tp"}, init=normal(0.02))  # [h, n/tp*d]
        self.norm2 = weight(mesh, 64, init=ones())  # [h]
        self.w_gate = weight(mesh, 192, 64, shard={0: "tp"}, init=normal(0.02))  # [f/tp, h]
        self.w_up = weight(mesh, 192, 64, shard={0: "tp"}, init=normal(0.02))  # [f/tp, h]
        self.w_down = weight(mesh, 64, 192, shard={1: "tp"}, init=normal(0.02))  # [h, f/tp]

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        a = rms_norm(x, self.norm1, eps=1e-5)  # [s/tp, b, h]  llama.scale:21
        a = all_gather(a, self.tp, dim=0)  # [s, b, h]  S(seq)→R  bwd: reduce_scatter  llama.scale:22
        q = rope(linear(a, self.wq).unflatten(-1, (2, 16)), rotary)  # [s, b, n/tp, d]  llama.scale:22
        k = rope(linear(a, self.wk).unflatten(-1, (1, 16)), rotary)  # [s, b, k/tp, d]  llama.scale:23
        v = linear(a, self.wv).unflatten(-1, (1, 16))  # [s, b, k/tp, d]  llama.scale:24
        y = linear(attention(q, k, v, seq=0).flatten(-2), self.wo)  # [s, b, h] partial over tp  llama.scale:25
        x = x + reduce_scatter(y, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:25
        m = rms_norm(x, self.norm2, eps=1e-5)  # [s/tp, b, h]  llama.scale:27
        m = all_gather(m, self.tp, dim=0)  # [s, b, h]  S(seq)→R  bwd: reduce_scatter  llama.scale:28
        # [s, b, h] partial over tp  llama.scale:28
        y = linear(silu(linear(m, self.w_gate)) * linear(m, self.w_up), self.w_down)
        x = x + reduce_scatter(y, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:28
        return x


class Llama(nn.Module):
    """The sum of token losses of this rank's part of a microbatch.  tokens: [s, b], labels: [s, b]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        self.wte = weight(mesh, 256, 64, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        self.norm = weight(mesh, 64, init=ones())  # [h]
        self.head = weight(mesh, 256, 64, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(2))
        rotary = rope_frequencies(128, 16, theta=500_000, between=2, mesh=mesh, dtype=torch.float32)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = embedding(tokens, self.wte, self.tp)  # [s, b, h] partial over tp  llama.scale:19
        x = reduce_scatter(x, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:20
        for layer in self.layers:
            x = layer(x, self.rotary)  # llama.scale:20
        n = rms_norm(x, self.norm, eps=1e-5)  # [s/tp, b, h]  llama.scale:30
        n = all_gather(n, self.tp, dim=0)  # [s, b, h]  S(seq)→R  bwd: reduce_scatter  llama.scale:30
        logits = linear(n, self.head)  # [s, b, v/tp]  llama.scale:30
        logits_max = max_logit(logits)  # [s, b] maximal over tp  llama.scale:30
        logits_max = all_reduce(logits_max, self.tp, op="max")  # [s, b]  M→R  no gradient  llama.scale:30
        # [s, b] partial over tp  llama.scale:30
        sum_exp, label_logit = local_softmax_stats(logits, logits_max, labels, self.tp)
        sum_exp = all_reduce(sum_exp, self.tp)  # [s, b]  P→I  bwd: none  llama.scale:30
        label_logit = all_reduce(label_logit, self.tp)  # [s, b]  P→I  bwd: none  llama.scale:30
        loss = token_loss(sum_exp, label_logit, labels)  # [] partial over dp  llama.scale:30
        return loss


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """The model, and its parameters, gradients and optimizer state in a flat bucket for each placement."""
    model = Llama(mesh)
    buckets = {
        "dp_split_tp": Bucket(
            ParamGroup(
                "wte",
                "layers.*.wq",
                "layers.*.wk",
                "layers.*.wv",
                "layers.*.wo",
                "layers.*.w_gate",
                "layers.*.w_up",
                "layers.*.w_down",
                "head",
                weight_decay=0.1,
            ),
        ),
        "dp_tp": Bucket(ParamGroup("layers.*.norm1", "layers.*.norm2", "norm", weight_decay=0.1)),
    }
    optimizer = AdamW(betas=(0.9, 0.95), eps=1e-8)
    return model, TrainState(model, mesh, buckets, optimizer, dtype=torch.float32, master=torch.float32)


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    dp_tp = mesh.axis("dp", "tp")
    tp = mesh.axis("tp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # labels of the step that count
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    for tokens, labels in batch.microbatches():
        loss_sum = model(tokens, labels)
        (loss_sum * inv_num_tokens).backward()
        loss += loss_sum.detach()
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()
    all_reduce_(gradients["dp_split_tp"], dp)  # P→I  65,536 × f32
    all_reduce_(gradients["dp_tp"], dp_tp)  # P→I  320 × f32
    grad_norm = (all_reduce_(sum_squares(gradients["dp_split_tp"]), tp) + sum_squares(gradients["dp_tp"])).sqrt()
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
    for tokens, labels in batch.microbatches():
        loss += model(tokens, labels)
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    return Metrics(loss=loss, tokens=num_tokens)


PLAN = Plan(
    name="tiny_llama",
    mesh={"dp": 2, "tp": 2},
    data=Text(("python_stdlib",), holdout=0.05),
    inputs={
        "tokens": Input(("seq", "batch"), {"batch": ("dp",)}),
        "labels": Input(("seq", "batch"), {"batch": ("dp",)}),
    },
    vocab=256,
    seq=128,
    global_batch=32,
    microbatches=2,
    steps=240,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    account=Account("cpu", (8767492,)),
    model="d68821ee93ce",  # what is computed, on any mesh
    names=HFNames(
        torch.float32,
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
