"""Llama on 1 rank: data parallel 1 × tensor parallel 1.

Written by scalec 0.2.0 from one_rank.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=1 train.py

Options: see --help.  Shapes in comments are one rank's:

    v vocab 256, h hidden 64, n heads 4, k kv_heads 2, d head_dim 16, f ffn 192, layers 2, s seq 128,
    b batch 8 per rank
    I, R    on an axis: the same on all ranks, invariant or replicated; S(dim) sharded, P partial
    P→I     a change of placement; bwd: what backward does for it

Verified: the IR's step was evaluated equal to the single-device step of the model before any placement;
this file matches the IR, op for op;
no loss depends on a later token.
Not verified: rounding, kernels, the network.  plan.json holds the certificate; SCALEC_SANITIZE=1 checks a run.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from scalec.runtime import (
    AdamW,
    Batch,
    Bucket,
    Cosine,
    Input,
    Mesh,
    Metrics,
    ParamGroup,
    Plan,
    Text,
    TrainState,
    attention,
    clip_scale,
    count_valid,
    cross_entropy,
    embedding,
    normal,
    ones,
    read_hf_names,
    read_predictions,
    rms_norm,
    rope,
    rope_frequencies,
    sum_squares,
    train,
    weight,
)

VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM, KV_HEADS, FFN, SEQ = 256, 64, 2, 4, 16, 2, 192, 128


class Layer(nn.Module):
    """A layer, of 2.  x: [b, s, h]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm1 = weight(mesh, HIDDEN, init=ones())  # [h]
        self.wq = weight(mesh, HEADS * HEAD_DIM, HIDDEN, init=normal(0.02))  # [n*d, h]
        self.wk = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, init=normal(0.02))  # [k*d, h]
        self.wv = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, init=normal(0.02))  # [k*d, h]
        self.wo = weight(mesh, HIDDEN, HEADS * HEAD_DIM, init=normal(0.02))  # [h, n*d]
        self.norm2 = weight(mesh, HIDDEN, init=ones())  # [h]
        self.w_gate = weight(mesh, FFN, HIDDEN, init=normal(0.02))  # [f, h]
        self.w_up = weight(mesh, FFN, HIDDEN, init=normal(0.02))  # [f, h]
        self.w_down = weight(mesh, HIDDEN, FFN, init=normal(0.02))  # [h, f]

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        a = rms_norm(x, self.norm1, eps=1e-5)  # [b, s, h]  llama.scale:21
        q = rope(linear(a, self.wq).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [b, s, n, d]  llama.scale:22
        k = rope(linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [b, s, k, d]  llama.scale:23
        v = linear(a, self.wv).unflatten(-1, (-1, HEAD_DIM))  # [b, s, k, d]  llama.scale:24
        x = x + linear(attention(q, k, v).flatten(-2), self.wo)  # [b, s, h]  llama.scale:25
        m = rms_norm(x, self.norm2, eps=1e-5)  # [b, s, h]  llama.scale:27
        return x + linear(silu(linear(m, self.w_gate)) * linear(m, self.w_up), self.w_down)  # [b, s, h]  llama.scale:28


class Llama(nn.Module):
    """Llama; forward returns the summed token loss of a microbatch.  tokens: [b, s], labels: [b, s]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.wte = weight(mesh, VOCAB, HIDDEN, init=normal(0.02))  # [v, h]
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(LAYERS))
        self.norm = weight(mesh, HIDDEN, init=ones())  # [h]
        self.head = weight(mesh, VOCAB, HIDDEN, init=normal(0.02))  # [v, h]
        rotary = rope_frequencies(SEQ, HEAD_DIM, theta=500_000, dtype=torch.float32, mesh=mesh)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = embedding(tokens, self.wte)  # [b, s, h]  llama.scale:19
        for layer in self.layers:
            x = layer(x, self.rotary)  # llama.scale:20
        return cross_entropy(linear(rms_norm(x, self.norm, eps=1e-5), self.head), labels)  # []  llama.scale:30


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """The model, and its state: parameters grouped by how their gradients are reduced."""
    model = Llama(mesh)
    buckets = {
        "params": Bucket(
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
        ),
    }
    optimizer = AdamW(betas=(0.9, 0.95), eps=1e-8)
    return model, TrainState(model, mesh, buckets, optimizer, dtype=torch.float32, master=torch.float32)


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    num_tokens = count_valid(batch.labels)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    for tokens, labels in batch.microbatches():
        loss_sum = model(tokens, labels)
        (loss_sum * inv_num_tokens).backward()
        loss += loss_sum.detach()
    loss = loss * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()
    grad_norm = sum_squares(gradients["params"]).sqrt()
    finite = loss.isfinite() & grad_norm.isfinite()  # otherwise nothing is updated
    state.update(lr, scale=clip_scale(grad_norm, 1.0), skip=num_tokens == 0, finite=finite)
    return Metrics(loss=loss, norm=grad_norm, tokens=num_tokens)


@torch.no_grad()
def eval_step(model: nn.Module, state: TrainState, batch: Batch) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    num_tokens = count_valid(batch.labels)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    for tokens, labels in batch.microbatches():
        loss += model(tokens, labels)
    loss = loss * inv_num_tokens  # mean over the step's labels
    return Metrics(loss=loss, tokens=num_tokens)


PLAN = Plan(
    name="one_rank",
    mesh={"dp": 1, "tp": 1},
    data=Text(("python_stdlib",), holdout=0.05),
    inputs={
        "tokens": Input(("batch", "seq"), {}),
        "labels": Input(("batch", "seq"), {}),
    },
    vocab=VOCAB,
    seq=SEQ,
    global_batch=32,
    microbatches=4,
    steps=240,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    model="d68821ee93ce",  # hash of the model on any mesh; checkpoints must have the same
    predictions=read_predictions(
        "predictions.json",
        beside=__file__,
        sha256="b165f82244efe307690432a1b272206219fb62ab312dbab1d24d73d83acbc79c",
    ),
    names=read_hf_names(
        "hf_names.json",
        beside=__file__,
        sha256="5e79b55f8bc44a990eb19d31e9c6193a70d811775b59be7792b3394f25f1cbb2",
    ),
)

if __name__ == "__main__":
    train(PLAN, build, train_step, eval_step)
