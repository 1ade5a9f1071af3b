"""DeepSeek-V3 and models of its kind, such as Moonlight: latent attention, dense layers first, then
experts in groups.

Defaults are as in its configuration class in transformers 5.23.
"""

from .config import NOT_NEGATIVE, Config
from .fields import model_of, positions
from .plan_text import Model, number_text

LATENT_EPS = 1e-6
"""The eps of the latents' norms, whatever the configuration says of the others."""

QUERIES = "rmsnorm(a @ wq_a[hidden -> q_rank], norm_q[q_rank], eps) @ wq_b[q_rank -> heads, qk]"


def deepseek_v3(config: Config) -> Model:
    """DeepSeek-V3."""
    for name in ("attention_bias", "mlp_bias"):
        config.must_be(name, False)
    config.must_be("hidden_act", "silu")
    config.must_be("pretraining_tp", 1, None)
    for name in ("head_dim", "qk_head_dim"):  # the sums of others
        config.take(name)
    config.leave_out("attention_dropout", 0)
    heads, pe = config.size("num_attention_heads", 128), config.size("qk_rope_head_dim", 64)
    config.must_be("num_key_value_heads", heads, None)
    rope, eps = positions(config, pe, beside=True), config.number("rms_norm_eps", 1e-6)
    q_rank = config.size("q_lora_rank", 1536, null=0)
    ffn = config.size("moe_intermediate_size", 2048)
    sizes = {
        "vocab": config.size("vocab_size", 129280),
        "hidden": config.size("hidden_size", 7168),
        "heads": heads,
        "q_rank": q_rank,
        "kv_rank": config.size("kv_lora_rank", 512),
        "nope": config.size("qk_nope_head_dim", 128),
        "pe": pe,
        "v_dim": config.size("v_head_dim", 128),
        "ffn": config.size("intermediate_size", 18432),
        "expert_ffn": ffn,
        "shared_ffn": ffn * config.size("n_shared_experts", 1),
        "eps": eps,
        "theta": rope.theta,
        **_layers(config),
        **_experts(config),
    }
    replaced = {**rope.get_replacements("theta"), ", balance=1e-4": ""}
    if not config.flag("norm_topk_prob", True):
        replaced[", normalise=on"] = ""
    if not q_rank:
        replaced |= _whole_queries()
    if rope.temper != 1:
        scale = number_text(rope.temper / (sizes["nope"] + pe) ** 0.5)
        replaced["mask=causal"] = f"mask=causal, scale={scale}"
    if eps != LATENT_EPS:
        ranks = ("q_rank", "kv_rank") if q_rank else ("kv_rank",)
        replaced |= {f"[{rank}], eps": f"[{rank}], {number_text(LATENT_EPS)}" for rank in ranks}
    if not config.flag("rope_interleave", True):
        replaced |= {"interleaved(": "", ", pe, from=nope)": "", ", pe, from=kv_rank)": ""}
    without = () if q_rank else ("q_rank",)
    return model_of(
        config, "deepseek_v3.scale", sizes, most=4096, replaced=replaced, without=without
    )


def _whole_queries() -> dict[str, str]:
    """Queries that are made without latents."""
    names = "model.layers.{i}.self_attn"
    return {
        QUERIES: "a @ wq[hidden -> heads, qk]",
        f'  wq_a    = "{names}.q_a_proj.weight"\n  norm_q  = "{names}.q_a_layernorm.weight"\n': "",
        f'wq_b    = interleaved("{names}.q_b_proj': f'wq = interleaved("{names}.q_proj',
    }


def _layers(config: Config) -> dict[str, float]:
    """The number of layers, and how many dense ones come first; there are some of each kind."""
    config.must_be("moe_layer_freq", 1)
    layers = config.layers("num_hidden_layers", 61)
    dense = config.layers("first_k_dense_replace", 3)
    if dense >= layers:
        message = f"of {layers} layers, {dense} are to have no experts"
        config.misfit(message, "first_k_dense_replace", "num_hidden_layers", label="none is left")
    return {"layers": layers, "dense": dense}


def _experts(config: Config) -> dict[str, float]:
    """The experts of a layer, and how they are chosen."""
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    # of a run, or of the loss that is left out
    for name in ("output_router_logits", "ep_size", "seq_aux"):
        config.take(name)
    for name in ("aux_loss_alpha", "num_nextn_predict_layers"):
        config.leave_out(name, 0, NOT_NEGATIVE)
    name = "n_routed_experts"
    count, chosen = config.size(name, 256), config.size("num_experts_per_tok", 8)
    groups, among = config.size("n_group", 8), config.size("topk_group", 4)
    group_size = config.quotient(name, "n_group")
    if group_size == 1 < groups:
        config.misfit("a group has one expert, and is chosen by its two best", "n_group", name)
    elif among > groups:
        config.misfit(f"{among} of {groups} groups cannot be chosen", "topk_group", "n_group")
    elif chosen > group_size * among:
        message = f"{chosen} of {group_size * among} experts cannot be chosen"
        config.misfit(message, "num_experts_per_tok", name, "n_group", "topk_group")
    factor = config.number("routed_scaling_factor", 2.5)
    return {"experts": count, "chosen": chosen, "groups": groups, "among": among, "factor": factor}
