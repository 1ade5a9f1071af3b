"""TinyMoe on 16 ranks: pp 2 × dp 2 × cp 2 × tp 2.

Written by scalec 0.2.0 from tiny_five.scale: change the plan, not this file.

    torchrun --standalone --nproc-per-node=16 train.py

Options: see --help.  Shapes in comments are one rank's:

    v vocab 256, h hidden 64, n heads 4, k kv_heads 2, d head_dim 16, f ffn 96, experts 8, expert_ffn 48,
    layers 4, s seq 128, b batch 4 per rank, chosen 2
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
    Experts,
    Input,
    Mesh,
    Metrics,
    ParamGroup,
    Pipeline,
    Plan,
    Positions,
    StageInput,
    Text,
    TrainState,
    add_load,
    all_gather,
    all_reduce,
    all_reduce_,
    balance,
    clip_scale,
    combine,
    count_valid,
    dispatch,
    embedding,
    exchange,
    exchange_back,
    exchange_counts,
    grouped_linear,
    local_softmax_stats,
    max_logit,
    no_load,
    no_loss,
    normal,
    ones,
    read_hf_names,
    read_predictions,
    read_schedule,
    reduce_scatter,
    ring_attention,
    rms_norm,
    rope,
    rope_frequencies,
    sort_by_expert,
    sum_squares,
    token_loss,
    top_k,
    train,
    unshard_ahead,
    wait,
    weight,
)

VOCAB = 256
HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
KV_HEADS = 2
EXPERTS = 8
EXPERT_FFN = 48
FFN = 96
SEQ = 128
LAYERS = 4
CHOSEN = 2
FIRST, LAST = 0, 3  # stages

LAYERS_OF_STAGE = {  # by repeat: the layers of stage 0, of stage 1, …
    "layers": (range(0, 1), range(1, 2), range(2, 3), range(3, 4)),
}


class Layer(nn.Module):
    """A layer, of 4.

    x: [b, s/cp_tp, h], router_loss: [] partial over dp_cp_tp, load: [layers, experts] partial over dp_cp_tp
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        self.cp = mesh.axis("cp")
        self.cp_tp = mesh.axis("cp", "tp")
        self.experts = Experts(mesh, EXPERTS, "dp", "cp", "tp", tokens=("dp", "cp", "tp"))
        self.norm1 = weight(mesh, HIDDEN, init=ones())  # [h]
        self.wq = weight(mesh, HEADS * HEAD_DIM, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [n/tp*d, h]
        self.wk = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [k/tp*d, h]
        self.wv = weight(mesh, KV_HEADS * HEAD_DIM, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [k/tp*d, h]
        self.wo = weight(mesh, HIDDEN, HEADS * HEAD_DIM, shard={1: "tp"}, init=normal(0.02))  # [h, n/tp*d]
        self.norm2 = weight(mesh, HIDDEN, init=ones())  # [h]
        self.router = weight(mesh, EXPERTS, HIDDEN, init=normal(0.02))  # [experts, h]
        self.w_gate = weight(mesh, FFN, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [f/tp, h]
        self.w_up = weight(mesh, FFN, HIDDEN, shard={0: "tp"}, init=normal(0.02))  # [f/tp, h]
        # [experts/dp_cp_tp*expert_ffn, h]
        self.e_gate = weight(mesh, EXPERTS * EXPERT_FFN, HIDDEN, shard={0: ("dp", "cp", "tp")}, init=normal(0.02))
        # [experts/dp_cp_tp*expert_ffn, h]
        self.e_up = weight(mesh, EXPERTS * EXPERT_FFN, HIDDEN, shard={0: ("dp", "cp", "tp")}, init=normal(0.02))
        # [experts/dp_cp_tp*h, expert_ffn]
        self.e_down = weight(mesh, EXPERTS * HIDDEN, EXPERT_FFN, shard={0: ("dp", "cp", "tp")}, init=normal(0.02))
        self.w_down = weight(mesh, HIDDEN, FFN, shard={1: "tp"}, init=normal(0.02))  # [h, f/tp]

    def forward(self, x: Tensor, router_loss: Tensor, load: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = rms_norm(x, self.norm1, eps=1e-6)  # [b, s/cp_tp, h]  tiny_moe.scale:21
        a = all_gather(a, self.tp, dim=1)  # [b, s/cp, h]  S(seq)→R  bwd: reduce_scatter  tiny_moe.scale:22
        q = rope(linear(a, self.wq).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [b, s/cp, n/tp, d]  tiny_moe.scale:22
        k = rope(linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM)), rotary)  # [b, s/cp, k/tp, d]  tiny_moe.scale:23
        v = linear(a, self.wv).unflatten(-1, (-1, HEAD_DIM))  # [b, s/cp, k/tp, d]  tiny_moe.scale:24
        # [b, s/cp, h] partial over tp  rotate over cp  bwd: rotate  tiny_moe.scale:25
        y = linear(ring_attention(q, k, v, self.cp, zigzag=True).flatten(-2), self.wo)
        x = x + reduce_scatter(y, self.tp, dim=1)  # [b, s/cp_tp, h]  P→S(seq)  bwd: all_gather  tiny_moe.scale:25
        m = rms_norm(x, self.norm2, eps=1e-6)  # [b, s/cp_tp, h]  tiny_moe.scale:27
        logits = linear(m, self.router)  # [b, s/cp_tp, experts]  tiny_moe.scale:29
        gates, ids = top_k(logits, CHOSEN)  # [b, s/cp_tp, chosen]  tiny_moe.scale:29
        order = sort_by_expert(ids, self.experts)  # [rows]  tiny_moe.scale:29
        rows_per_expert = exchange_counts(order)  # [rows]  all_to_all over dp_cp_tp  tiny_moe.scale:30
        # [rows, h]  all_to_all over dp_cp_tp  bwd: wait  tiny_moe.scale:30
        pending_expert_in = exchange(dispatch(m, order), rows_per_expert, async_op=True)
        # [] partial over dp_cp_tp  all_reduce over cp_tp  tiny_moe.scale:29
        router_loss = router_loss + balance(logits, ids, by=3.125e-5, seq=1, over=self.cp_tp)
        load = add_load(load, ids)  # [layers, experts] partial over dp_cp_tp  tiny_moe.scale:29
        m = all_gather(m, self.tp, dim=1)  # [b, s/cp, h]  S(seq)→R  bwd: reduce_scatter  tiny_moe.scale:32
        g = silu(linear(m, self.w_gate))  # [b, s/cp, f/tp]  tiny_moe.scale:32
        up = linear(m, self.w_up)  # [b, s/cp, f/tp]  tiny_moe.scale:32
        expert_in = wait(pending_expert_in)  # [rows, h]  bwd: begins the exchange  tiny_moe.scale:30
        # [rows, expert_ffn]  tiny_moe.scale:30
        expert_hidden = silu(grouped_linear(expert_in, self.e_gate, rows_per_expert))
        # [rows, expert_ffn]  tiny_moe.scale:30
        expert_hidden = expert_hidden * grouped_linear(expert_in, self.e_up, rows_per_expert)
        expert_out = grouped_linear(expert_hidden, self.e_down, rows_per_expert)  # [rows, h]  tiny_moe.scale:30
        # [rows, h]  all_to_all over dp_cp_tp  bwd: wait  tiny_moe.scale:29
        pending_expert_out = exchange_back(expert_out, rows_per_expert, async_op=True)
        down = linear(g * up, self.w_down)  # [b, s/cp, h] partial over tp  tiny_moe.scale:32
        down = reduce_scatter(down, self.tp, dim=1)  # [b, s/cp_tp, h]  P→S(seq)  bwd: all_gather  tiny_moe.scale:32
        # [b, s/cp_tp, h]  bwd: begins the exchange  tiny_moe.scale:29
        y = combine(wait(pending_expert_out), gates, order)
        x = x + y + down  # [b, s/cp_tp, h]  tiny_moe.scale:32
        return x, router_loss, load


class TinyMoe(nn.Module):
    """A rank's stages of TinyMoe; the forward of the last one returns losses and loads of a microbatch.

    tokens: [b, s/cp], labels: [b, s/cp]
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
        positions = Positions(mesh, SEQ, "cp", zigzag=("cp",))
        rotary = rope_frequencies(SEQ, HEAD_DIM, theta=10_000, dtype=torch.float32, mesh=mesh, positions=positions)
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(
        self,
        stage: int,
        carried: tuple[Tensor, Tensor, Tensor],
        tokens: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if stage == FIRST:
            x = embedding(tokens, self.wte, self.tp)  # [b, s/cp, h] partial over tp  tiny_moe.scale:19
            load = no_load(tokens, LAYERS, EXPERTS)  # [layers, experts] partial over dp_cp_tp  tiny_moe.scale:29
            x = reduce_scatter(x, self.tp, dim=1)  # [b, s/cp_tp, h]  P→S(seq)  bwd: all_gather  tiny_moe.scale:20
            router_loss = no_loss(x)  # [] partial over dp_cp_tp  tiny_moe.scale:20
        else:
            x, router_loss, load = carried
        for i in LAYERS_OF_STAGE["layers"][stage]:
            x, router_loss, load = self.layers[str(i)](x, router_loss, load, self.rotary)  # tiny_moe.scale:20
        if stage < LAST:
            return x, router_loss, load
        n = rms_norm(x, self.norm, eps=1e-6)  # [b, s/cp_tp, h]  tiny_moe.scale:34
        n = all_gather(n, self.tp, dim=1)  # [b, s/cp, h]  S(seq)→R  bwd: reduce_scatter  tiny_moe.scale:34
        logits = linear(n, self.head)  # [b, s/cp, v/tp]  tiny_moe.scale:34
        local_max = max_logit(logits)  # [b, s/cp] maximal over tp  tiny_moe.scale:34
        logits_max = all_reduce(local_max, self.tp, op="max")  # [b, s/cp]  M→R  no gradient  tiny_moe.scale:34
        # [b, s/cp] partial over tp  tiny_moe.scale:34
        sum_exp, label_logit = local_softmax_stats(logits, logits_max, labels, self.tp)
        sum_exp = all_reduce(sum_exp, self.tp)  # [b, s/cp]  P→I  bwd: none  tiny_moe.scale:34
        label_logit = all_reduce(label_logit, self.tp)  # [b, s/cp]  P→I  bwd: none  tiny_moe.scale:34
        loss = token_loss(sum_exp, label_logit, labels)  # [] partial over dp_cp  tiny_moe.scale:34
        return loss, router_loss, load


PIPELINE = Pipeline(
    "pp",
    stage_to_rank=(0, 1, 0, 1),
    stage_inputs=(
        StageInput("x", (4, SEQ // 4, HIDDEN), torch.float32),
        StageInput("router_loss", (), torch.float32),
        StageInput("load", (LAYERS, EXPERTS), torch.int64, gradient=False),
    ),
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
    model, stages_of_param = PIPELINE.build(TinyMoe, mesh)
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
            shard_axes=("dp", "cp"),
            stages="pp",
        ),
        "params": Bucket(
            ParamGroup("layers.*.norm1", "layers.*.norm2", "layers.*.router", "norm", weight_decay=0.1),
            shard_axes=("dp", "cp"),
            reduce_axes=("tp",),
            stages="pp",
        ),
        "layers.matrices": Bucket(
            ParamGroup("layers.*.e_gate", "layers.*.e_up", "layers.*.e_down", weight_decay=0.1),
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
    dp_cp = mesh.axis("dp", "cp")
    pp_dp_cp = mesh.axis("pp", "dp", "cp")
    pp_dp_cp_tp = mesh.axis("pp", "dp", "cp", "tp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp_cp)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    load = no_load(num_tokens, LAYERS, EXPERTS)
    flat_params = state.flat_params()
    # S→R  up to (768 + 23,808) × f32 per stage, awaited before its first forward
    unshard_ahead(dp_cp, flat_params["params"], flat_params["matrices"])
    # matrices: P→S over dp_cp  up to 23,808 × f32 per stage, after its last backward
    # params: P→S over dp_cp, P→I over tp  up to 768 × f32 per stage, after its last backward
    # forward and backward  tiny_five.scale:6
    loss, router_loss, load = PIPELINE.run(
        model,
        batch,
        inv_num_tokens,
        mesh,
        flat_params,
        router_share=1.0,
        loads=(load,),
    )
    loss = all_reduce_(loss, pp_dp_cp) * inv_num_tokens  # mean over the step's labels
    gradients = state.gradients()  # waits for the stages' reductions
    router_loss = all_reduce_(router_loss, pp_dp_cp_tp)
    load = all_reduce_(load, pp_dp_cp_tp)  # tokens that chose each expert
    grad_norm = (
        all_reduce_(sum_squares(*gradients["matrices"], *gradients["layers.matrices"]), pp_dp_cp_tp)
        + all_reduce_(sum_squares(*gradients["params"]), pp_dp_cp)
    ).sqrt()
    finite = loss.isfinite() & grad_norm.isfinite()  # otherwise nothing is updated
    state.update(lr, scale=clip_scale(grad_norm, 1.0), skip=num_tokens == 0, finite=finite)
    return Metrics(loss=loss, norm=grad_norm, tokens=num_tokens, router_loss=router_loss, loads=(load,))


@torch.no_grad()
def eval_step(model: nn.Module, state: TrainState, batch: Batch) -> Metrics:
    """The loss alone: the forward of `train_step`."""
    mesh = state.mesh
    dp_cp = mesh.axis("dp", "cp")
    pp_dp_cp = mesh.axis("pp", "dp", "cp")
    num_tokens = all_reduce_(count_valid(batch.labels), dp_cp)  # tokens with a label, over all ranks
    inv_num_tokens = num_tokens.clamp(min=1).to(torch.float32).reciprocal()
    flat_params = state.flat_params()
    # S→R  up to (768 + 23,808) × f32 per stage, awaited before its first forward
    unshard_ahead(dp_cp, flat_params["params"], flat_params["matrices"])
    loss = PIPELINE.evaluate(model, batch, mesh, flat_params)  # forward  tiny_five.scale:6
    loss = all_reduce_(loss, pp_dp_cp) * inv_num_tokens  # mean over the step's labels
    return Metrics(loss=loss, tokens=num_tokens)


PLAN = Plan(
    name="tiny_five",
    mesh={"pp": 2, "dp": 2, "cp": 2, "tp": 2},
    data=Text(("python_stdlib",), holdout=0.05),
    inputs={
        "tokens": Input(("batch", "seq"), {"batch": ("dp",), "seq": ("cp",)}, zigzag=("cp",)),
        "labels": Input(("batch", "seq"), {"batch": ("dp",), "seq": ("cp",)}, zigzag=("cp",)),
    },
    vocab=VOCAB,
    seq=SEQ,
    global_batch=32,
    microbatches=4,
    steps=120,
    seed=0,
    lr=3e-3,
    schedule=Cosine(warmup=20, floor=3e-4),
    model="360e8110d6f2",  # hash of the model on any mesh; checkpoints must have the same
    predictions=read_predictions(
        "predictions.json",
        beside=__file__,
        sha256="6a053424be6e320b795aa82ee55e3d2eba8aab3b05cff295143fd8f531890aa3",
    ),
    names=read_hf_names(
        "hf_names.json",
        beside=__file__,
        sha256="c5299c2e9c355c0a9f8309c52146d79b58e918b66666e728254a43da44bdf8c7",
    ),
)

if __name__ == "__main__":
    train(PLAN, build, train_step, eval_step)
