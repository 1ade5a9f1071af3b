"""Gemma, and Gemma 2 and 3, whose layers alternate in their attention.

Defaults are as in their configuration classes in transformers 5.23.
"""

from attrs import evolve

from .config import Config
from .fields import Rope, check_layers, check_pairs, model_of, positions, rope_of
from .llama import MASK
from .plan_text import Model, number_text

ACTIVATION = "gelu_pytorch_tanh"


def gemma(config: Config) -> Model:
    """Gemma 1, whose first files call its activation `gelu`."""
    config.must_be("hidden_act", ACTIVATION, "gelu")
    layers, dim = _gemma(config)
    check_layers(config, layers, "full_attention")
    rope = positions(config, dim)
    model = _model(config, "gemma.scale", {"layers": layers, "head_dim": dim}, rope)
    return evolve(model, replaced={**model.replaced, MASK: f"{MASK}{rope.scale(dim)}"})


def gemma2(config: Config) -> Model:
    """Gemma 2."""
    config.must_be("hidden_act", ACTIVATION)
    layers, dim = _gemma(config)
    check_layers(config, layers, "sliding_attention", "full_attention")
    if layers % 2:
        label = f"{layers} / 2 = {layers / 2:g}"
        config.misfit("a plan is written for pairs of layers", "num_hidden_layers", label=label)
    window = config.size("sliding_window", 4096)
    config.check_repeats("sliding_window_size", "sliding_window", window)
    sizes = {
        "pairs": layers // 2,
        "head_dim": dim,
        "window": window,
        "score": config.number("query_pre_attn_scalar", 256),
        "cap": config.number("attn_logit_softcapping", 50),
        "logit_cap": config.number("final_logit_softcapping", 30),
    }
    rope = positions(config, dim)
    model = _model(config, "gemma2.scale", sizes, rope)
    return evolve(model, replaced={**model.replaced, **_scale_replacements(rope, "")})


def _scale_replacements(rope: Rope, after: str) -> dict[str, str]:
    """The scale of attention with the factor of cosines and sines, where `after` follows it in
    the file.
    """
    if rope.table == 1:
        return {}
    scale = f"scale=1 / sqrt(score){after}"
    return {scale: scale.replace("1", number_text(rope.table**2), 1)}


def gemma3(config: Config) -> Model:
    """Gemma 3, of text alone."""
    config.must_be("hidden_act", ACTIVATION)
    layers, dim = _gemma(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.must_be(name, None)
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        config.must_be(name, 6)
    check_layers(config, layers, *["sliding_attention"] * 5, "full_attention")
    blocks, remainder = divmod(layers, 6)
    if not blocks:
        label = f"{layers} is fewer than 6"
        config.misfit("a plan is written for blocks of 6 layers", "num_hidden_layers", label=label)
    check_pairs(config, dim)
    rope, local_theta = _positions_of_layers(config)
    sizes = {
        "blocks": blocks,
        "rest": remainder,
        "head_dim": dim,
        "local_theta": local_theta,
        "window": config.size("sliding_window", 4096),
        "score": config.number("query_pre_attn_scalar", 256),
    }
    model = _model(config, "gemma3.scale", sizes, rope)
    scaled = _scale_replacements(rope, ") @ g_wo")  # layers that see all tokens
    replaced = {**model.replaced, **scaled, "{24+i}": f"{{{6 * blocks}+i}}"}
    return evolve(model, replaced=replaced, without=() if remainder else ("rest",))


def _positions_of_layers(config: Config) -> tuple[Rope, float]:
    """Positions of layers that see all tokens, and theta of sliding ones."""
    parameters, earlier = config.table("rope_parameters"), config.table("rope_scaling")
    full = parameters.table("full_attention") if parameters.has("full_attention") else earlier
    rope = rope_of(full, config.number("rope_theta", 1e6))
    local = parameters.table("sliding_attention")
    parameters.refuse_rest(
        "positions are those of `full_attention` or of `sliding_attention`, each a table"
    )
    local.must_be("rope_type", "default")
    return rope, local.number("rope_theta", config.number("rope_local_base_freq", 1e4))


def _gemma(config: Config) -> tuple[int, int]:
    """Checks for all Gemmas; their layers and the dims of a head."""
    config.must_be("hidden_activation", ACTIVATION, None)
    config.must_be("attention_bias", False)
    config.must_be("use_bidirectional_attention", False, None)
    config.leave_out("attention_dropout", 0)
    config.must_be("tie_word_embeddings", True)
    return config.layers("num_hidden_layers"), config.size("head_dim", 256)


def _model(config: Config, file: str, sizes: dict[str, float], rope: Rope) -> Model:
    shared = {
        "vocab": config.size("vocab_size"),
        "hidden": config.size("hidden_size"),
        "heads": config.size("num_attention_heads"),
        "kv_heads": config.size("num_key_value_heads"),
        "ffn": config.size("intermediate_size"),
        "eps": config.number("rms_norm_eps", 1e-6),
        "theta": rope.theta,
    }
    config.quotient("num_attention_heads", "num_key_value_heads")
    return model_of(
        config,
        file,
        {**shared, **sizes},
        most=8192,
        tied=None,
        replaced=rope.get_replacements("theta"),
    )
