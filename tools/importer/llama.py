"""Llama and the decoders whose configurations are like its own: Mistral, OLMo, Phi-3, Qwen,
StarCoder; mixtures too.

Defaults are as in their configuration classes in transformers 5.23.  The loss that balances experts
is a setting of training: a plan has it where the configuration asks for it by
`output_router_logits`.
"""

from attrs import evolve

from .config import FLAG, NOT_NEGATIVE, Config
from .fields import (
    GELU_TANH,
    SCALINGS,
    SHARE_ROTATED,
    check_layers,
    head_dim,
    model_of,
    positions,
    window,
)
from .plan_text import Model, number_text

MASK = "mask=causal"
ROUTER = "router[hidden -> experts], chosen"


def llama(config: Config) -> Model:
    """Llama 2 and 3."""
    config.must_be("attention_bias", False)
    config.must_be("mlp_bias", False)
    config.must_be("pretraining_tp", 1, None)
    return decoder(config, "llama.scale", eps=1e-6)


def mistral(config: Config) -> Model:
    """Mistral: Llama whose queries see a window."""
    return with_window(decoder(config, "llama.scale", eps=1e-6, kv=8, window=window(config, 4096)))


def with_window(model: Model) -> Model:
    """The model with its window, if it has one, which its file does not write."""
    window = model.sizes["window"]
    if not window:
        return model
    mask = model.replaced.get(MASK, MASK)
    return evolve(model, replaced={**model.replaced, MASK: f"{mask}, window={window}"})


def olmo2(config: Config) -> Model:
    """OLMo 2."""
    config.must_be("attention_bias", False)
    return decoder(config, "olmo2.scale", eps=1e-5)


def phi3(config: Config) -> Model:
    """Phi-3, Phi-3.5 and Phi-4, whose heads may be rotated in part."""
    for name in ("attention_bias", "mlp_bias"):
        config.must_be(name, False)
    for name in ("embd_pdrop", "resid_pdrop"):
        config.leave_out(name, 0)
    return decoder(
        config,
        "phi3.scale",
        eps=1e-5,
        part=SHARE_ROTATED,
        window=window(config),
        scalings=("default",),
    )


def qwen2(config: Config) -> Model:
    """Qwen2 and Qwen2.5."""
    full_attention(config)
    return decoder(config, "qwen2.scale", eps=1e-6)


def qwen3(config: Config) -> Model:
    """Qwen3."""
    config.must_be("attention_bias", False)
    full_attention(config)
    return decoder(config, "qwen3.scale", eps=1e-6, head=128)


def starcoder2(config: Config) -> Model:
    """StarCoder 2; its first files say in further fields what nothing reads."""
    config.take("activation_function")
    config.take("layer_norm_epsilon")
    config.must_be("norm_type", "layer_norm")
    config.must_be("mlp_type", "default")
    for name in (
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
        "use_bias",
    ):
        config.must_be(name, True)
    for name in ("embedding_dropout", "residual_dropout"):
        config.leave_out(name, 0)
    return decoder(
        config,
        "starcoder2.scale",
        eps=1e-5,
        norm="norm_epsilon",
        act=GELU_TANH,
        kv=2,
        tied=True,
        window=window(config),
    )


def full_attention(config: Config) -> None:
    """Qwen's sliding windows are off, whatever their size is; and positions are of text alone."""
    config.must_be("use_sliding_window", False)
    config.must_be("use_mrope", False)
    config.take("sliding_window")
    config.take("max_window_layers")


def decoder(
    config: Config,
    file: str,
    *,
    eps: float,
    norm: str = "rms_norm_eps",
    act: tuple[str, ...] = ("silu",),
    window: int = 0,
    head: int = 0,
    kv: int = 0,
    part: str = "",
    scalings: tuple[str, ...] = (*SCALINGS,),
    theta: float = 1e4,
    ffn: str = "intermediate_size",
    tied: bool = False,
) -> Model:
    """Dims and blocks that decoders share.

    `eps`, `head`, `kv`, `theta` and `tied` are defaults.  `norm`, `part` and `ffn` are fields: of
    `eps`, of the rotated part of heads and of an MLP's width.  `scalings` are the types of
    positions that the model may have.
    """
    config.must_be("hidden_act", *act)
    config.leave_out("attention_dropout", 0)
    layers = config.layers("num_hidden_layers")
    check_layers(config, layers, "sliding_attention" if window else "full_attention")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", kv or heads, null=heads)
    dim = head_dim(config, head)
    config.quotient("num_attention_heads", "num_key_value_heads")
    rope = positions(config, dim, part=part, base=theta, types=scalings)
    sizes: dict[str, float] = {
        "vocab": config.size("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": config.size(ffn),
        "layers": layers,
        "eps": config.number(norm, eps),
        "theta": rope.theta,
        "rotary": rope.dims,
        "window": window,
    }
    if head or dim * heads != hidden:
        sizes["head_dim"] = dim
    replaced = rope.get_replacements("rotary" if part else "theta")
    if scale := rope.scale(dim):
        replaced[MASK] = f"{MASK}{scale}"
    return model_of(config, file, sizes, tied=tied, replaced=replaced)


# ---- decoders whose MLPs are experts


def mixtral(config: Config) -> Model:
    """Mixtral."""
    config.must_be("router_jitter_noise", 0.0, 0)
    model = with_window(
        decoder(config, "mixtral.scale", eps=1e-5, kv=8, theta=1e6, window=window(config))
    )
    return _with_experts(config, model, "num_local_experts", experts=8, chosen=2, balance=0.001)


def olmoe(config: Config) -> Model:
    """OLMoE."""
    config.must_be("attention_bias", False)
    config.must_be("clip_qkv", None)
    config.must_be("sliding_window", None)
    normalised = config.flag("norm_topk_prob", False)
    model = decoder(config, "olmoe.scale", eps=1e-5)
    if normalised:
        replaced = {**model.replaced, "chosen)": "chosen, normalise=on)"}
        model = evolve(model, replaced=replaced)
    return _with_experts(config, model, "num_experts", experts=64, chosen=8, balance=0.01)


def qwen3_moe(config: Config) -> Model:
    """Qwen3's mixtures of experts, all of whose layers have experts; later files name their
    number as Mixtral does.
    """
    config.must_be("attention_bias", False)
    config.must_be("decoder_sparse_step", 1)
    config.must_be("mlp_only_layers", [], None)
    config.take("intermediate_size")  # of layers without experts
    full_attention(config)
    normalised = config.flag("norm_topk_prob", False)
    model = decoder(config, "qwen3_moe.scale", eps=1e-6, kv=4, ffn="moe_intermediate_size")
    sizes = {"head_dim": model.sizes["hidden"] // model.sizes["heads"], **model.sizes}
    replaced = dict(model.replaced)
    if not normalised:
        replaced[", normalise=on"] = ""
    model = evolve(model, sizes=sizes, replaced=replaced)
    return _with_experts(config, model, "num_experts", experts=128, chosen=8, balance=0.001)


def _with_experts(
    config: Config, model: Model, name: str, *, experts: int, chosen: int, balance: float
) -> Model:
    """A decoder whose MLP each of its experts has; `name` is the field of their number, the
    numbers are defaults.
    """
    aux_loss = _aux_loss(config, balance)
    count, chosen = config.size(name, experts), config.size("num_experts_per_tok", chosen)
    if chosen > count:
        config.misfit(f"{chosen} of {count} experts cannot be chosen", "num_experts_per_tok", name)
    sizes = {**model.sizes, "experts": count, "chosen": chosen, "expert_ffn": model.sizes["ffn"]}
    replaced = dict(model.replaced)
    if aux_loss:
        replaced[ROUTER] = f"{ROUTER}{aux_loss}"
    without_ffn = {name: size for name, size in sizes.items() if name != "ffn"}
    return evolve(model, sizes=without_ffn, replaced=replaced)


def _aux_loss(config: Config, default: float) -> str:
    """The arguments of `top` for the loss that transformers adds, of forwards of one sequence;
    "" for none.
    """
    if not config.get_field("output_router_logits", FLAG, False, False):
        config.leave_out("router_aux_loss_coef", default, NOT_NEGATIVE)
        return ""
    factor = config.get_field("router_aux_loss_coef", NOT_NEGATIVE, default, 0)
    return f", aux_loss={number_text(factor)}, aux_batch=1" if factor else ""
