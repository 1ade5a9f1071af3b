"""llama on 4 ranks: dp 2 × tp 2.

Written by scalec 0.1.0 from zero_3.scale: change the plan, not this file.

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
    FlatParams,
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
    recomputed,
    reduce_grads_in_backward,
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
        self.dp = mesh.axis("dp")
        self.wte = weight(mesh, 256, 64, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        self.norm = weight(mesh, 64, init=ones())  # [h]
        self.head = weight(mesh, 256, 64, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(2))
        rotary = rope_frequencies(128, 16, theta=500_000, between=2, mesh=mesh, dtype=torch.bfloat16)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, flat_params: FlatParams) -> Tensor:
        x = embedding(tokens, self.wte, self.tp)  # [s, b, h] partial over tp  llama.scale:19
        x = reduce_scatter(x, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:20
        for layer, layer_dp_tp, layer_dp_split_tp in zip(
            self.layers,
            flat_params["layers_dp_tp"],
            flat_params["layers_dp_split_tp"],
            strict=True,
        ):
            x = reduce_grads_in_backward(x, layer_dp_split_tp, scatter=self.dp, each=True)  # bwd: P→S  12,288 × f32
            # bwd: P→S, P→I  64 × f32
            x = reduce_grads_in_backward(x, layer_dp_tp, scatter=self.dp, add=self.tp, each=True)
            x = unshard(x, layer_dp_split_tp, self.dp)  # S→R  24,576 × bf16  bwd: freed
            x = unshard(x, layer_dp_tp, self.dp)  # S→R  128 × bf16  bwd: freed
            x = recomputed(layer, x, self.rotary)  # bwd: forward again  llama.scale:20
            x = reshard(x, layer_dp_tp, self.dp)  # freed  bwd: S→R again
            x = reshard(x, layer_dp_split_tp, self.dp)  # freed  bwd: S→R again
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
        "layers_dp_tp": Bucket(
            ParamGroup("layers.*.norm1", "layers.*.norm2", weight_decay=0.1),
            per_layer=True,
            shard_axes=("dp",),
            shard_gradients=True,
            reshard_after_forward=True,
        ),
        "layers_dp_split_tp": Bucket(
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
        "dp_split_tp": Bucket(ParamGroup("wte", "head", weight_decay=0.1), shard_axes=("dp",)),
        "dp_tp": Bucket(ParamGroup("norm", weight_decay=0.1), shard_axes=("dp",)),
    }
    optimizer = AdamW(betas=(0.9, 0.95), eps=1e-8)
    return model, TrainState(model, mesh, buckets, optimizer, dtype=torch.bfloat16, master=torch.float32)


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    tp = mesh.axis("tp")
    dp_tp = mesh.axis("dp", "tp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # labels of the step that count
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    loss = torch.zeros_like(inv_num_tokens)
    weights = state.weights()
    all_gather_(weights["dp_tp"], dp)  # S→R  64 × bf16
    all_gather_(weights["dp_split_tp"], dp)  # S→R  16,384 × bf16
    flat_params = state.flat_params(len(batch))
    for tokens, labels in batch.microbatches():
        loss_sum = model(tokens, labels, flat_params)
        (loss_sum * inv_num_tokens).backward()
        loss += loss_sum.detach()
    loss = all_reduce_(loss, dp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()  # complete: what backward began
    gradients["dp_split_tp"] = reduce_scatter_(gradients["dp_split_tp"], dp)  # P→S  8,192 × f32
    gradients["dp_tp"] = reduce_scatter_(gradients["dp_tp"], dp)  # P→S  32 × f32
    all_reduce_(gradients["dp_tp"], tp)  # P→I  32 × f32
    grad_norm_sq = all_reduce_(sum_squares(gradients["layers_dp_tp"], gradients["dp_tp"]), dp)
    grad_norm_sq_2 = all_reduce_(sum_squares(gradients["layers_dp_split_tp"], gradients["dp_split_tp"]), dp_tp)
    grad_norm = (grad_norm_sq + grad_norm_sq_2).sqrt()
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
    all_gather_(weights["dp_tp"], dp)  # S→R  64 × bf16
    all_gather_(weights["dp_split_tp"], dp)  # S→R  16,384 × bf16
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
    vocab=256,
    seq=128,
    global_batch=32,
    microbatches=2,
    steps=240,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    account=Account("cpu", (3359748,)),
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
