"""Llama on 2 ranks: data parallel 2 × tensor parallel 1.

Written by scalec 0.2.0 from zero_1.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=2 train.py

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
    FlatParams,
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
    read_hf_names,
    read_predictions,
    reduce_scatter_,
    rms_norm,
    rope,
    rope_frequencies,
    sum_squares,
    train,
    unshard,
    unshard_ahead,
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
        rotary = rope_frequencies(SEQ, HEAD_DIM, theta=500_000, dtype=torch.bfloat16, mesh=mesh)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, flat_params: FlatParams) -> Tensor:
        x = embedding(tokens, self.wte)  # [b, s, h]  llama.scale:19
        for layer, params in zip(self.layers, flat_params["layers"], strict=True):
            # all_gather is complete
            # bwd: reduce_scatter over dp  24,768 × f32, in the last microbatch
            x = unshard(x, params)
            x = layer(x, self.rotary)  # llama.scale:20
        # [] partial over dp  llama.scale:30
        return cross_entropy(linear(rms_norm(x, self.norm, eps=1e-5), self.head), labels)


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """The model, and its state: parameters grouped by how their gradients are reduced."""
    model = Llama(mesh)
    buckets = {
        "layers.params": Bucket(
            ParamGroup(
                "layers.*.norm1",
                "layers.*.wq",
                "layers.*.wk",
                "layers.*.wv",
                "layers.*.wo",
                "layers.*.norm2",
                "layers.*.w_gate",
                "layers.*.w_up",
                "layers.*.w_down",
                weight_decay=0.1,
            ),
            per_layer=True,
            shard_axes=("dp",),
        ),
        "params": Bucket(ParamGroup("wte", "norm", "head", weight_decay=0.1), shard_axes=("dp",)),
    }
    optimizer = AdamW(betas=(0.9, 0.95), eps=1e-8)
    return model, TrainState(model, mesh, buckets, optimizer, dtype=torch.bfloat16, master=torch.float32)


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    weights = state.weights()
    all_gather_(weights["params"], dp)  # S→R  32,896 × bf16
    flat_params = state.flat_params(len(batch))
    unshard_ahead(dp, flat_params["layers"])  # S→R  2 × 49,536 × bf16, awaited before each layer
    for tokens, labels in batch.microbatches():
        loss_sum = model(tokens, labels, flat_params)
        (loss_sum * inv_num_tokens).backward()
        loss += loss_sum.detach()
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()  # waits for the reductions that backward began
    gradients["params"] = reduce_scatter_(gradients["params"], dp)  # P→S  16,448 × f32
    grad_norm = all_reduce_(sum_squares(gradients["layers.params"], gradients["params"]), dp).sqrt()
    finite = loss.isfinite() & grad_norm.isfinite()  # otherwise nothing is updated
    state.update(lr, scale=clip_scale(grad_norm, 1.0), skip=num_tokens == 0, finite=finite)
    return Metrics(loss=loss, norm=grad_norm, tokens=num_tokens)


@torch.no_grad()
def eval_step(model: nn.Module, state: TrainState, batch: Batch) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    weights = state.weights()
    all_gather_(weights["params"], dp)  # S→R  32,896 × bf16
    flat_params = state.flat_params()
    unshard_ahead(dp, flat_params["layers"])  # S→R  2 × 49,536 × bf16, awaited before each layer
    for tokens, labels in batch.microbatches():
        loss += model(tokens, labels, flat_params)
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    return Metrics(loss=loss, tokens=num_tokens)


PLAN = Plan(
    name="zero_1",
    mesh={"dp": 2, "tp": 1},
    data=Text(("python_stdlib",), holdout=0.05),
    inputs={
        "tokens": Input(("batch", "seq"), {"batch": ("dp",)}),
        "labels": Input(("batch", "seq"), {"batch": ("dp",)}),
    },
    vocab=VOCAB,
    seq=SEQ,
    global_batch=32,
    microbatches=2,
    steps=240,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    model="d68821ee93ce",  # hash of the model on any mesh; checkpoints must have the same
    predictions=read_predictions(
        "predictions.json",
        beside=__file__,
        sha256="a83f5b43a7d42e3b3254bfb6b31ef5bb77d7df481ec6f032dbfa359a89263ffa",
    ),
    names=read_hf_names(
        "hf_names.json",
        beside=__file__,
        sha256="e73d4c6f668bab35a8a88de15ca2bd07b263188145d878634e4c4593974d43de",
    ),
)

if __name__ == "__main__":
    train(PLAN, build, train_step, eval_step)
