"""Llama on 4 ranks: data parallel 2 × tensor parallel 2.

Written by scalec 0.2.0 from zero_3.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=4 train.py

Options: see --help.  Shapes in comments are one rank's:

    v vocab 256, h hidden 64, n heads 4, k kv_heads 2, d head_dim 16, f ffn 192, layers 2, s seq 128,
    b batch 8 per rank
    v/tp    the part of v that a rank of tp holds
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
    all_gather,
    all_gather_,
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
    read_hf_names,
    read_predictions,
    recomputed,
    reduce_scatter,
    reduce_scatter_,
    reshard,
    rms_norm,
    rope,
    rope_frequencies,
    sum_squares,
    token_loss,
    train,
    unshard,
    weight,
)

VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM, KV_HEADS, FFN, SEQ = 256, 64, 2, 4, 16, 2, 192, 128


class Layer(nn.Module):
    """A layer, of 2.  x: [s/tp, b, h]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        self.norm1 = weight(mesh, HIDDEN, init=ones())  # [h]
        self.wq = weight(mesh, HEADS * HEAD_DIM, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [n/tp*d, h]
        self.wk = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [k/tp*d, h]
        self.wv = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [k/tp*d, h]
        self.wo = weight(mesh, HIDDEN, HEADS * HEAD_DIM, shard={1: "tp"}, init=normal(0.02))  # [h, n/tp*d]
        self.norm2 = weight(mesh, HIDDEN, init=ones())  # [h]
        self.w_gate = weight(mesh, FFN, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [f/tp, h]
        self.w_up = weight(mesh, FFN, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [f/tp, h]
        self.w_down = weight(mesh, HIDDEN, FFN, shard={1: "tp"}, init=normal(0.02))  # [h, f/tp]

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        a = rms_norm(x, self.norm1, eps=1e-5)  # [s/tp, b, h]  llama.scale:21
        a = all_gather(a, self.tp, dim=0)  # [s, b, h]  S(seq)→R  bwd: reduce_scatter  llama.scale:22
        q = rope(linear(a, self.wq).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [s, b, n/tp, d]  llama.scale:22
        k = rope(linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [s, b, k/tp, d]  llama.scale:23
        v = linear(a, self.wv).unflatten(-1, (-1, HEAD_DIM))  # [s, b, k/tp, d]  llama.scale:24
        y = linear(attention(q, k, v, layout="sbhd").flatten(-2), self.wo)  # [s, b, h] partial over tp  llama.scale:25
        x = x + reduce_scatter(y, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:25
        m = rms_norm(x, self.norm2, eps=1e-5)  # [s/tp, b, h]  llama.scale:27
        m = all_gather(m, self.tp, dim=0)  # [s, b, h]  S(seq)→R  bwd: reduce_scatter  llama.scale:28
        # [s, b, h] partial over tp  llama.scale:28
        y = linear(silu(linear(m, self.w_gate)) * linear(m, self.w_up), self.w_down)
        return x + reduce_scatter(y, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:28


class Llama(nn.Module):
    """Llama; forward returns the summed token loss of a microbatch.  tokens: [s, b], labels: [s, b]"""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        self.wte = weight(mesh, VOCAB, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(LAYERS))
        self.norm = weight(mesh, HIDDEN, init=ones())  # [h]
        self.head = weight(mesh, VOCAB, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        rotary = rope_frequencies(SEQ, HEAD_DIM, theta=500_000, seq_dim=-4, dtype=torch.bfloat16, mesh=mesh)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, flat_params: FlatParams) -> Tensor:
        x = embedding(tokens, self.wte, self.tp)  # [s, b, h] partial over tp  llama.scale:19
        x = reduce_scatter(x, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:20
        for layer, params in zip(self.layers, flat_params["layers"], strict=True):
            # all_gather over dp  (24,576 + 128) × bf16
            # bwd: freed, reduce_scatter over dp  (64 + 12,288) × f32, all_reduce over tp  64 × f32
            x = unshard(x, params)
            x = recomputed(layer, x, self.rotary)  # bwd: recomputed  llama.scale:20
            x = reshard(x, params)  # freed  bwd: all_gather
        n = rms_norm(x, self.norm, eps=1e-5)  # [s/tp, b, h]  llama.scale:30
        n = all_gather(n, self.tp, dim=0)  # [s, b, h]  S(seq)→R  bwd: reduce_scatter  llama.scale:30
        logits = linear(n, self.head)  # [s, b, v/tp]  llama.scale:30
        local_max = max_logit(logits)  # [s, b] maximal over tp  llama.scale:30
        logits_max = all_reduce(local_max, self.tp, op="max")  # [s, b]  M→R  no gradient  llama.scale:30
        # [s, b] partial over tp  llama.scale:30
        sum_exp, label_logit = local_softmax_stats(logits, logits_max, labels, self.tp)
        sum_exp = all_reduce(sum_exp, self.tp)  # [s, b]  P→I  bwd: none  llama.scale:30
        label_logit = all_reduce(label_logit, self.tp)  # [s, b]  P→I  bwd: none  llama.scale:30
        return token_loss(sum_exp, label_logit, labels)  # [] partial over dp  llama.scale:30


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """The model, and its state: parameters grouped by how their gradients are reduced."""
    model = Llama(mesh)
    buckets = {
        "layers.vectors": Bucket(
            ParamGroup("layers.*.norm1", "layers.*.norm2", weight_decay=0.1),
            per_layer=True,
            shard_axes=("dp",),
            reduce_axes=("tp",),
            shard_gradients=True,
            reshard_after_forward=True,
        ),
        "layers.matrices": Bucket(
            ParamGroup(
                "layers.*.wq",
                "layers.*.wk",
                "layers.*.wv",
                "layers.*.wo",
                "layers.*.w_gate",
                "layers.*.w_up",
                "layers.*.w_down",
                weight_decay=0.1,
            ),
            per_layer=True,
            shard_axes=("dp",),
            shard_gradients=True,
            reshard_after_forward=True,
        ),
        "matrices": Bucket(ParamGroup("wte", "head", weight_decay=0.1), shard_axes=("dp",)),
        "vectors": Bucket(ParamGroup("norm", weight_decay=0.1), shard_axes=("dp",)),
    }
    optimizer = AdamW(betas=(0.9, 0.95), eps=1e-8)
    return model, TrainState(model, mesh, buckets, optimizer, dtype=torch.bfloat16, master=torch.float32)


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    tp = mesh.axis("tp")
    dp_tp = mesh.axis("dp", "tp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    weights = state.weights()
    all_gather_(weights["vectors"], dp)  # S→R  64 × bf16
    all_gather_(weights["matrices"], dp)  # S→R  16,384 × bf16
    flat_params = state.flat_params(len(batch))
    for tokens, labels in batch.microbatches():
        loss_sum = model(tokens, labels, flat_params)
        (loss_sum * inv_num_tokens).backward()
        loss += loss_sum.detach()
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()  # waits for the reductions that backward began
    gradients["matrices"] = reduce_scatter_(gradients["matrices"], dp)  # P→S  8,192 × f32
    gradients["vectors"] = reduce_scatter_(gradients["vectors"], dp)  # P→S  32 × f32
    all_reduce_(gradients["vectors"], tp)  # P→I  32 × f32
    grad_norm = (
        all_reduce_(sum_squares(gradients["layers.vectors"], gradients["vectors"]), dp)
        + all_reduce_(sum_squares(gradients["layers.matrices"], gradients["matrices"]), dp_tp)
    ).sqrt()
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
    all_gather_(weights["vectors"], dp)  # S→R  64 × bf16
    all_gather_(weights["matrices"], dp)  # S→R  16,384 × bf16
    flat_params = state.flat_params()
    for tokens, labels in batch.microbatches():
        loss += model(tokens, labels, flat_params)
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    return Metrics(loss=loss, tokens=num_tokens)


PLAN = Plan(
    name="zero_3",
    mesh={"dp": 2, "tp": 2},
    data=Text(("python_stdlib",), holdout=0.05),
    inputs={
        "tokens": Input(("seq", "batch"), {"batch": ("dp",)}),
        "labels": Input(("seq", "batch"), {"batch": ("dp",)}),
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
        sha256="2bc34b6768d46cb124a27bc893a46b0e774305f210e617ccc2403b17ed1d9ff2",
    ),
    names=read_hf_names(
        "hf_names.json",
        beside=__file__,
        sha256="e73d4c6f668bab35a8a88de15ca2bd07b263188145d878634e4c4593974d43de",
    ),
)

if __name__ == "__main__":
    train(PLAN, build, train_step, eval_step)
