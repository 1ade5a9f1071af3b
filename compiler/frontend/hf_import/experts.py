"""Decoders whose MLPs are experts: Mixtral, OLMoE, Qwen3's mixtures.

Defaults are those of their configuration classes in transformers 5.23.  The loss that balances experts is of training:
transformers takes it over a batch, a plan's `balance` over each sequence.
"""

from attrs import evolve

from .config import NOT_NEGATIVE, Config
from .fields import window
from .llama import decoder, full_attention, windowed
from .plan_text import Model


def mixtral(config: Config) -> Model:
    """Mixtral."""
    config.must_be("router_jitter_noise", 0.0, 0)
    model = windowed(decoder(config, "mixtral.scale", eps=1e-5, kv=8, theta=1e6, window=window(config)))
    return _routed(config, model, "num_local_experts", experts=8, chosen=2, balance=0.001)


def olmoe(config: Config) -> Model:
    """OLMoE."""
    config.must_be("attention_bias", False)
    config.must_be("clip_qkv", None)
    normalised = {"chosen)": "chosen, normalise=on)"} if config.flag("norm_topk_prob", False) else {}
    model = decoder(config, "olmoe.scale", eps=1e-5)
    model = evolve(model, replaced={**model.replaced, **normalised})
    return _routed(config, model, "num_experts", experts=64, chosen=8, balance=0.01)


def qwen3_moe(config: Config) -> Model:
    """Qwen3's mixtures of experts, all of whose layers have experts; later files name their number as Mixtral does."""
    config.must_be("attention_bias", False)
    config.must_be("decoder_sparse_step", 1)
    config.must_be("mlp_only_layers", [], None)
    config.take("intermediate_size")  # of layers without experts
    full_attention(config)
    plain = {} if config.flag("norm_topk_prob", False) else {", normalise=on": ""}
    model = decoder(config, "qwen3_moe.scale", eps=1e-6, kv=4, ffn="moe_intermediate_size")
    sizes = {"head_dim": model.sizes["hidden"] // model.sizes["heads"], **model.sizes}
    model = evolve(model, sizes=sizes, replaced={**model.replaced, **plain})
    name = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    return _routed(config, model, name, experts=128, chosen=8, balance=0.001)


def _routed(config: Config, model: Model, name: str, *, experts: int, chosen: int, balance: float) -> Model:
    """A decoder whose MLP each of its experts has; `name` is the field of their number, the numbers are defaults."""
    config.take("output_router_logits")  # whether the loss has what is left out here
    config.leave_out("router_aux_loss_coef", balance, NOT_NEGATIVE)
    count, chosen = config.size(name, experts), config.size("num_experts_per_tok", chosen)
    if chosen > count:
        config.misfit(f"{chosen} of {count} experts cannot be chosen", "num_experts_per_tok", name)
    sizes = {**model.sizes, "experts": count, "chosen": chosen, "expert_ffn": model.sizes["ffn"]}
    return evolve(model, sizes={name: size for name, size in sizes.items() if name != "ffn"})
