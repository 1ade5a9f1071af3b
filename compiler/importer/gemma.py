"""Gemma 2 and 3, whose layers take turns in their attention.

Defaults are those of their configuration classes in transformers 5.23.
"""

from attrs import evolve

from .common import LONGEST, check_layers, positions, precision, rope_of
from .config import Config
from .text import Model


def gemma2(config: Config) -> Model:
    """Gemma 2."""
    layers = _gemma(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.must_not_be_null(name)
    check_layers(config, layers, "sliding_attention", "full_attention")
    if layers % 2:
        config.wrong("num_hidden_layers", "layers without a partner", "a plan is written for pairs of them")
    theta, rope = positions(config)
    sizes = {
        "pairs": layers // 2,
        "theta": theta,
        "window": config.number("sliding_window", 4096),
        "cap": config.number("attn_logit_softcapping", 50),
        "logit_cap": config.number("final_logit_softcapping", 30),
    }
    return _gemma_model(config, "gemma2.scale", sizes, rope)


def gemma3(config: Config) -> Model:
    """Gemma 3, of text alone."""
    layers = _gemma(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.must_be(name, None)
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        config.must_be(name, 6)
    check_layers(config, layers, *["sliding_attention"] * 5, "full_attention")
    theta, local_theta, rope = _both_positions(config)
    blocks, rest = divmod(layers, 6)
    if not blocks:
        config.wrong("num_hidden_layers", "fewer layers than a block has", "a plan is written for 6 and more")
    sizes = {
        "blocks": blocks,
        "rest": rest,
        "theta": theta,
        "local_theta": local_theta,
        "window": config.number("sliding_window", 4096),
    }
    model = _gemma_model(config, "gemma3.scale", sizes, rope)
    return evolve(model, indices={"{24+i}": f"{{{6 * blocks}+i}}"}, without=() if rest else ("rest",))


def _both_positions(config: Config) -> tuple[float, float, str]:
    """Theta of layers that see all tokens, theta of sliding ones, and what `rope` is given besides in the former."""
    given = config.table("rope_parameters")
    if given.keys() - {"full_attention", "sliding_attention"}:
        config.wrong("rope_parameters", "positions of other layers than full and sliding ones")
    full, sliding = given.get("full_attention", config.table("rope_scaling")), given.get("sliding_attention", {})
    theta, rope = rope_of(config, "rope_parameters", full, config.number("rope_theta", 1e6))
    local = config.number("rope_local_base_freq", 1e4)
    local_theta, scaled = rope_of(config, "rope_parameters", sliding, local)
    if scaled:
        config.wrong("rope_parameters", "scaled positions in sliding layers", "a plan is written for `default` there")
    return theta, local_theta, rope


def _gemma(config: Config) -> int:
    """What Gemma 2 and 3 share and must have; the number of layers."""
    for name in ("hidden_act", "hidden_activation"):
        config.must_be(name, "gelu_pytorch_tanh")
    for name in ("attention_bias", "use_bidirectional_attention"):
        config.must_be(name, False)
    config.leave_out("attention_dropout", 0)
    config.must_be("tie_word_embeddings", True)
    return int(config.number("num_hidden_layers"))


def _gemma_model(config: Config, file: str, sizes: dict[str, float], rope: str) -> Model:
    shared = {
        "vocab": config.number("vocab_size"),
        "hidden": config.number("hidden_size"),
        "heads": config.number("num_attention_heads"),
        "kv_heads": config.number("num_key_value_heads"),
        "head_dim": config.number("head_dim", 256),
        "ffn": config.number("intermediate_size"),
        "eps": config.number("rms_norm_eps", 1e-6),
        "score": config.number("query_pre_attn_scalar", 256),
    }
    return Model(
        file,
        {**shared, **sizes},
        config.number("initializer_range", 0.02),
        min(LONGEST, int(config.number("max_position_embeddings", 8192))),
        precision(config),
        rope=rope,
    )
