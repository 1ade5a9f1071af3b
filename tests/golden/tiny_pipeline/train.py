"""llama on 8 ranks: pp 2 × dp 2 × tp 2.

Written by scalec 0.1.0 from tiny_pipeline.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=8 train.py

and options [--steps N] [--lr X] [--data GLOB ...] [--resume], of which --help says more.

Shapes in comments are one rank's: v vocab 256, h hidden 64, n heads 4, k kv_heads 2, d head_dim 16, f ffn 192,
layers 4, s seq 128, b batch 4 per rank; v/tp is the part of v that a rank of axis tp holds.  On an axis a value is
I invariant, R replicated, S(dim) sharded or P partial; P→I is a change of placement, and bwd what backward does for
it.

Shown: the IR's step evaluated equal to the single-device step of the model before any placement (loss, gradient
norm, count of labels, 12 gradients and 12 updated parameters; on pp 2 × dp 3 × tp 2 and pp 3 × dp 2 × tp 3 at small
sizes, in integers modulo 2147483579, 6 trials, error below 2^-71), the rows of 2 and 3 ranks of pp run action by
action, their messages first in, first out (those of this plan are checked to be complete, in order and free of
deadlock, not run), and this file matches the IR, op for op.  Not shown: rounding, kernels, the network; run time is
tested by scalec's own suite on gloo, and for this program by SCALEC_RECORD=1 and SCALEC_SANITIZE=1.
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
    Pipeline,
    Plan,
    StageInput,
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
    stage_grad_reduction,
    sum_squares,
    token_loss,
    train,
    unshard_ahead,
    weight,
)

LAYERS_OF_STAGE = {  # of each repeat, those of each stage
    "layers": (range(0, 1), range(1, 2), range(2, 3), range(3, 4)),
}


class Layer(nn.Module):
    """One of 4 layers.  x: [s/tp, b, h]"""

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
    """One of a rank's stages, the last of which gives the sum of token losses of this rank's part of a microbatch.

    Nothing enters the first one.  tokens: [s, b], labels: [s, b]
    """

    def __init__(self, mesh: Mesh, stages: tuple[int, ...]) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        if 0 in stages:
            self.wte = weight(mesh, 256, 64, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        if 3 in stages:
            self.norm = weight(mesh, 64, init=ones())  # [h]
            self.head = weight(mesh, 256, 64, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        self.layers = nn.ModuleDict({str(i): Layer(mesh) for stage in stages for i in LAYERS_OF_STAGE["layers"][stage]})
        rotary = rope_frequencies(128, 16, theta=500_000, between=2, mesh=mesh, dtype=torch.float32)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, stage: int, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        if stage == 0:
            x = embedding(tokens, self.wte, self.tp)  # [s, b, h] partial over tp  llama.scale:19
            x = reduce_scatter(x, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:20
        for i in LAYERS_OF_STAGE["layers"][stage]:
            x = self.layers[str(i)](x, self.rotary)  # llama.scale:20
        if stage < 3:
            return x
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


PIPELINE = Pipeline(
    "pp",
    stage_to_rank=(0, 1, 0, 1),
    stage_inputs=(StageInput("x", (64, 4, 64), torch.float32),),
    rows=(
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 0F2 0SEND_F2 2RECV_B0 2B0 2SEND_B0 "
        "2RECV_B1 0F3 0SEND_F3 2B1 2SEND_B1 2RECV_F2 0RECV_B0 2F2 2SEND_F2 0B0 2RECV_F3 0RECV_B1 2F3 2SEND_F3 0B1 "
        "2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 0RECV_B2 0B2 0RECV_B3 0B3",
        "1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 3RECV_F0 1SEND_F1 3F0 3RECV_F1 1RECV_F2 3B0 3SEND_B0 3F1 1RECV_B0 3B1 "
        "3SEND_B1 1RECV_F3 1F2 1RECV_B1 1SEND_F2 1B0 1SEND_B0 3RECV_F2 1F3 1SEND_F3 1B1 1SEND_B1 3RECV_F3 3F2 3B2 "
        "3SEND_B2 3F3 1RECV_B2 3B3 3SEND_B3 1B2 1RECV_B3 1SEND_B2 1B3 1SEND_B3",
    ),
)


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """The model, and its parameters, gradients and optimizer state in a flat bucket for each placement."""
    model, stages_of_param = PIPELINE.build(Llama, mesh)
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
            shard_axes=("dp",),
            stages="pp",
        ),
        "dp_tp": Bucket(
            ParamGroup("layers.*.norm1", "layers.*.norm2", "norm", weight_decay=0.1),
            shard_axes=("dp",),
            stages="pp",
        ),
    }
    optimizer = AdamW(betas=(0.9, 0.95), eps=1e-8)
    return model, TrainState(
        model,
        mesh,
        buckets,
        optimizer,
        dtype=torch.float32,
        master=torch.float32,
        stages_of_param=stages_of_param,
    )


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Counts the labels, runs forward and backward of each microbatch, reduces gradients, clips, updates."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    tp = mesh.axis("tp")
    pp_dp = mesh.axis("pp", "dp")
    pp_dp_tp = mesh.axis("pp", "dp", "tp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # labels of the step that count
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    flat_params = state.flat_params()
    # S→R  up to (192 + 33,024) × f32, awaited by each stage
    unshard_ahead(dp, flat_params["dp_tp"], flat_params["dp_split_tp"])
    reductions = [
        stage_grad_reduction(flat_params["dp_split_tp"], scatter=dp),  # P→S  up to 33,024 × f32, behind each stage
        stage_grad_reduction(flat_params["dp_tp"], scatter=dp, add=tp),  # P→S, P→I  up to 192 × f32, behind each stage
    ]
    # forward, backward  tiny_pipeline.scale:5
    loss = PIPELINE.run(model, batch, inv_num_tokens, mesh, flat_params, reductions)
    loss = all_reduce_(loss, pp_dp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()  # complete: what stages began
    grad_norm_sq = all_reduce_(sum_squares(*gradients["dp_split_tp"]), pp_dp_tp)
    grad_norm_sq_2 = all_reduce_(sum_squares(*gradients["dp_tp"]), pp_dp)
    grad_norm = (grad_norm_sq + grad_norm_sq_2).sqrt()
    state.update(lr, scale=clip_scale(grad_norm, 1.0), skip=num_tokens == 0)
    return Metrics(loss=loss, norm=grad_norm, tokens=num_tokens)


@torch.no_grad()
def eval_step(model: nn.Module, state: TrainState, batch: Batch) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    pp_dp = mesh.axis("pp", "dp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # labels of the step that count
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    flat_params = state.flat_params()
    # S→R  up to (192 + 33,024) × f32, awaited by each stage
    unshard_ahead(dp, flat_params["dp_tp"], flat_params["dp_split_tp"])
    loss = PIPELINE.evaluate(model, batch, mesh, flat_params)  # forward  tiny_pipeline.scale:5
    loss = all_reduce_(loss, pp_dp) * inv_num_tokens  # mean over the step's labels
    return Metrics(loss=loss, tokens=num_tokens)


PLAN = Plan(
    name="tiny_pipeline",
    mesh={"pp": 2, "dp": 2, "tp": 2},
    data=Text(("python_stdlib",), holdout=0.05),
    inputs={
        "tokens": Input(("seq", "batch"), {"batch": ("dp",)}),
        "labels": Input(("seq", "batch"), {"batch": ("dp",)}),
    },
    vocab=256,
    seq=128,
    global_batch=32,
    microbatches=4,
    steps=240,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    account=Account("cpu", (8984580, 6347524), axis="pp"),
    model="b42bf95fa1c9",  # what is computed, on any mesh
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
        repeats={"layers": 4},
    ),
)

if __name__ == "__main__":
    train(PLAN, build, train_step, eval_step)
