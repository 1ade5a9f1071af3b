"""Llama on 8 ranks: pipeline parallel 2 × data parallel 2 × tensor parallel 2.

Written by scalec 0.2.0 from tiny_pipeline.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=8 train.py

Options: see --help.  Shapes in comments are one rank's:

    v vocab 256, h hidden 64, n heads 4, k kv_heads 2, d head_dim 16, f ffn 192, layers 4, s seq 128,
    b batch 4 per rank
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
    read_hf_names,
    read_predictions,
    read_schedule,
    reduce_scatter,
    rms_norm,
    rope,
    rope_frequencies,
    sum_squares,
    token_loss,
    train,
    unshard_ahead,
    weight,
)

VOCAB, HIDDEN, HEADS, HEAD_DIM, KV_HEADS, FFN, SEQ = 256, 64, 4, 16, 2, 192, 128
FIRST, LAST = 0, 3  # stages

LAYERS_OF_STAGE = {  # by repeat: the layers of stage 0, of stage 1, …
    "layers": (range(0, 1), range(1, 2), range(2, 3), range(3, 4)),
}


class Layer(nn.Module):
    """A layer, of 4.  x: [s/tp, b, h]"""

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
    """A rank's stages of Llama; the forward of the last one returns the summed token loss of a microbatch.

    tokens: [s, b], labels: [s, b]
    """

    def __init__(self, mesh: Mesh, stages: tuple[int, ...]) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        if FIRST in stages:
            self.wte = weight(mesh, VOCAB, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        self.layers = nn.ModuleDict({str(i): Layer(mesh) for stage in stages for i in LAYERS_OF_STAGE["layers"][stage]})
        if LAST in stages:
            self.norm = weight(mesh, HIDDEN, init=ones())  # [h]
            self.head = weight(mesh, VOCAB, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [v/tp, h]
        rotary = rope_frequencies(SEQ, HEAD_DIM, theta=500_000, seq_dim=-4, dtype=torch.float32, mesh=mesh)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(self, stage: int, x: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        if stage == FIRST:
            x = embedding(tokens, self.wte, self.tp)  # [s, b, h] partial over tp  llama.scale:19
            x = reduce_scatter(x, self.tp, dim=0)  # [s/tp, b, h]  P→S(seq)  bwd: all_gather  llama.scale:20
        for i in LAYERS_OF_STAGE["layers"][stage]:
            x = self.layers[str(i)](x, self.rotary)  # llama.scale:20
        if stage < LAST:
            return x
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


PIPELINE = Pipeline(
    "pp",
    stage_to_rank=(0, 1, 0, 1),
    stage_inputs=(StageInput("x", (SEQ // 2, 4, HIDDEN), torch.float32),),
    schedule=read_schedule(
        "schedule.csv",
        beside=__file__,
        sha256="72b098075226a67592705d664c09840f1b9daa6784f828f8dbba935bc7b8f6f0",
    ),
    message_groups=read_schedule(
        "message_groups.csv",
        beside=__file__,
        sha256="b1b7ba377d0c04a0a2b1475da0bc2eb42b82caa5f11541bdd4ab270c87b80097",
    ),
)


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """The model, and its state: parameters grouped by how their gradients are reduced."""
    model, stages_of_param = PIPELINE.build(Llama, mesh)
    buckets = {
        "matrices": Bucket(
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
        "vectors": Bucket(
            ParamGroup("layers.*.norm1", "layers.*.norm2", "norm", weight_decay=0.1),
            shard_axes=("dp",),
            reduce_axes=("tp",),
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
    pp_dp = mesh.axis("pp", "dp")
    pp_dp_tp = mesh.axis("pp", "dp", "tp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    flat_params = state.flat_params()
    # S→R  up to (192 + 33,024) × f32 per stage, awaited before its first forward
    unshard_ahead(dp, flat_params["vectors"], flat_params["matrices"])
    # matrices: P→S over dp  up to 33,024 × f32 per stage, after its last backward
    # vectors: P→S over dp, P→I over tp  up to 192 × f32 per stage, after its last backward
    loss = PIPELINE.run(model, batch, inv_num_tokens, mesh, flat_params)  # forward and backward  tiny_pipeline.scale:5
    loss = all_reduce_(loss, pp_dp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()  # waits for the stages' reductions
    grad_norm = (
        all_reduce_(sum_squares(*gradients["matrices"]), pp_dp_tp)
        + all_reduce_(sum_squares(*gradients["vectors"]), pp_dp)
    ).sqrt()
    finite = loss.isfinite() & grad_norm.isfinite()  # otherwise nothing is updated
    state.update(lr, scale=clip_scale(grad_norm, 1.0), skip=num_tokens == 0, finite=finite)
    return Metrics(loss=loss, norm=grad_norm, tokens=num_tokens)


@torch.no_grad()
def eval_step(model: nn.Module, state: TrainState, batch: Batch) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    mesh = state.mesh
    dp = mesh.axis("dp")
    pp_dp = mesh.axis("pp", "dp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    flat_params = state.flat_params()
    # S→R  up to (192 + 33,024) × f32 per stage, awaited before its first forward
    unshard_ahead(dp, flat_params["vectors"], flat_params["matrices"])
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
    vocab=VOCAB,
    seq=SEQ,
    global_batch=32,
    microbatches=4,
    steps=240,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    model="b42bf95fa1c9",  # hash of the model on any mesh; checkpoints must have the same
    predictions=read_predictions(
        "predictions.json",
        beside=__file__,
        sha256="11232107ce41ca0766c633276a48f550ac1d50b466ca156cbd0fc40d11c0bbf4",
    ),
    names=read_hf_names(
        "hf_names.json",
        beside=__file__,
        sha256="4c7bbbc92fac7dd619c07d7bf96386e0eae289725a7e6e727f3ce9944f1fe251",
    ),
)

if __name__ == "__main__":
    train(PLAN, build, train_step, eval_step)
