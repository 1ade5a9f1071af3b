"""The model types of Hugging Face that our models express, and which field is which size.

Fields and their defaults are those of the configuration classes of transformers 5.23.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve

from ..diagnostics import listing
from .config import Config
from .text import Model, shown

LONGEST = 4096
"""Tokens of the sequences that a plan is written for, if the model takes so many."""

PRECISIONS = {"float32": "fp32", "float64": "fp64"}
"""What is stored in any other type trains in bf16, which keeps fp32 masters."""


def _llama(config: Config) -> Model:
    config.must_be("attention_bias", False)
    config.must_be("mlp_bias", False)
    config.must_be("pretraining_tp", 1)
    return _decoder(config, "llama.scale", eps=1e-6)


def _qwen2(config: Config) -> Model:
    _full_attention(config)
    return _decoder(config, "qwen2.scale", eps=1e-6)


def _qwen3(config: Config) -> Model:
    config.must_be("attention_bias", False)
    _full_attention(config)
    return _decoder(config, "qwen3.scale", eps=1e-6, head_dim=128)


def _full_attention(config: Config) -> None:
    """Qwen's sliding windows are off, whatever their size is; and positions are those of text."""
    config.must_be("use_sliding_window", False)
    config.must_be("use_mrope", False)
    config.take("sliding_window", 0)
    config.take("max_window_layers", 0)
    layers = config.take("layer_types", [])
    if set(layers) - {"full_attention"}:
        config.wrong(
            "layer_types",
            "some layers have another attention than the others",
            "a plan is written for `full_attention`",
        )


def _decoder(config: Config, file: str, *, eps: float, head_dim: int = 0) -> Model:
    """What Llama and its relatives share."""
    config.must_be("hidden_act", "silu")
    config.leave_out("attention_dropout", 0)
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    theta, rope = _rope(config)
    sizes = {
        "vocab": config.number("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", heads),
        "ffn": config.number("intermediate_size"),
        "layers": config.number("num_hidden_layers"),
        "eps": config.number("rms_norm_eps", eps),
        "theta": theta,
    }
    dim = config.number("head_dim", head_dim or hidden / heads)
    return Model(
        file,
        sizes if dim * heads == hidden else {**sizes, "head_dim": dim},
        config.number("initializer_range", 0.02),
        min(LONGEST, int(config.number("max_position_embeddings", 2048))),
        _precision(config),
        tied=bool(config.take("tie_word_embeddings", False)),
        rope=rope,
    )


def _gpt2(config: Config) -> Model:
    config.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.must_be("scale_attn_weights", True)
    for name in ("add_cross_attention", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx"):
        config.must_be(name, False)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        config.leave_out(name, 0.1)
    config.must_be("tie_word_embeddings", True)
    hidden, positions = config.number("n_embd", 768), config.number("n_positions", 1024)
    config.must_be("n_ctx", positions)
    sizes = {
        "vocab": config.number("vocab_size", 50257),
        "hidden": hidden,
        "heads": config.number("n_head", 12),
        "ffn": config.number("n_inner", 4 * hidden),
        "layers": config.number("n_layer", 12),
        "eps": config.number("layer_norm_epsilon", 1e-5),
    }
    return Model("gpt2.scale", sizes, config.number("initializer_range", 0.02), int(positions), _precision(config))


def _gemma2(config: Config) -> Model:
    layers = _gemma(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.must_not_be_null(name)
    _check_layers(config, layers, ["sliding_attention", "full_attention"])
    if layers % 2:
        config.wrong("num_hidden_layers", "layers without a partner", "a plan is written for pairs of them")
    theta, rope = _rope(config)
    sizes = {
        "pairs": layers // 2,
        "theta": theta,
        "window": config.number("sliding_window", 4096),
        "cap": config.number("attn_logit_softcapping", 50),
        "logit_cap": config.number("final_logit_softcapping", 30),
    }
    return _gemma_model(config, "gemma2.scale", sizes, rope)


def _gemma3(config: Config) -> Model:
    layers = _gemma(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.must_be(name, None)
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        config.must_be(name, 6)
    _check_layers(config, layers, ["sliding_attention"] * 5 + ["full_attention"])
    both = config.take("rope_parameters", {})
    theta, rope = _rope(config, both.get("full_attention"), 1e6)
    local_theta, local = _rope(config, both.get("sliding_attention", {}), config.number("rope_local_base_freq", 1e4))
    if local:
        config.wrong("rope_parameters", "scaled positions in sliding layers", "a plan is written for `default` there")
    blocks, rest = divmod(layers, 6)
    sizes = {
        "blocks": blocks,
        "rest": rest,
        "theta": theta,
        "local_theta": local_theta,
        "window": config.number("sliding_window", 4096),
    }
    model = _gemma_model(config, "gemma3.scale", sizes, rope)
    return evolve(model, indices={"{24+i}": f"{{{6 * blocks}+i}}"}, without=() if rest else ("rest",))


def _gemma(config: Config) -> int:
    """What Gemma 2 and 3 share and must have; the number of layers."""
    for name in ("hidden_act", "hidden_activation"):
        config.must_be(name, "gelu_pytorch_tanh")
    for name in ("attention_bias", "use_bidirectional_attention"):
        config.must_be(name, False)
    config.leave_out("attention_dropout", 0)
    config.must_be("tie_word_embeddings", True)
    return int(config.number("num_hidden_layers"))


def _check_layers(config: Config, count: int, pattern: list[str]) -> None:
    """Layers take turns in their attention."""
    wanted = [pattern[i % len(pattern)] for i in range(count)]
    if config.take("layer_types", wanted) != wanted:
        config.wrong(
            "layer_types", "layers take turns otherwise", f"a plan is written for {', '.join(pattern)}, again and again"
        )


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
        _precision(config),
        rope=rope,
    )


def _precision(config: Config) -> str:
    named = str(config.take("torch_dtype", "")), str(config.take("dtype", ""))
    return PRECISIONS.get("".join(named), "bf16")


def _rope(config: Config, given: Mapping[str, Any] | None = None, default: float = 1e4) -> tuple[float, str]:
    """Theta, and what `rope` is given besides: `rope_parameters` is what later files say in place of two fields."""
    field = "rope_scaling" if given is None and not config.has("rope_parameters") else "rope_parameters"
    values: Mapping[str, Any] = config.take(field, {}) if given is None else given
    theta = values.get("rope_theta") or config.number("rope_theta", default)
    kind = str(values.get("rope_type", values.get("type", "default")))
    words = SCALINGS.get(kind, {})
    if kind not in SCALINGS or set(values) - {"rope_theta", "rope_type", "type", *words}:
        help = f"a plan is written for {listing(SCALINGS)} alone"
        config.wrong(field, f"rotary positions of type `{kind}`, {json.dumps(values)}", help)
        return theta, ""
    options = [f"{ours}={shown(values[theirs])}" for theirs, ours in words.items()]
    return theta, ", ".join([f"scaling={kind}", *options]) if options else ""


SCALINGS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "original",
    },
}
"""The types of rotary positions, and what the options of each are called in a plan."""

FAMILIES: dict[str, Callable[[Config], Model]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
"""What each `model_type` is in a plan."""
