"""The model types of Hugging Face that our models express, and which field is which size.

Fields and their defaults are those of the configuration classes of transformers 5.23.
"""

from collections.abc import Callable, Mapping
from typing import Any

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
        calls={"rope": rope} if rope else {},
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


def _precision(config: Config) -> str:
    named = str(config.take("torch_dtype", "")), str(config.take("dtype", ""))
    return PRECISIONS.get("".join(named), "bf16")


def _rope(config: Config) -> tuple[float, str]:
    """Theta, and what `rope` is given besides; `rope_parameters` is what later files say in place of two fields."""
    given: Mapping[str, Any] = config.take("rope_parameters", None) or config.take("rope_scaling", {})
    theta = config.number("rope_theta", given.get("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    keys = {"default": {}, "linear": {"factor": "factor"}, "llama3": _LLAMA3}.get(kind)
    rest = set(given) - {"rope_theta", "rope_type", "type"} - set(keys or {})
    if keys is None or rest:
        field = "rope_parameters" if "rope_theta" in given else "rope_scaling"
        config.wrong(
            field,
            f"rotary positions of type `{kind}` with {', '.join(sorted(rest))}",
            "a plan is written for `default`, `linear` and `llama3`",
        )
        return theta, ""
    words = [f"{ours}={shown(given[theirs])}" for theirs, ours in keys.items()]
    return theta, ", ".join([f"scaling={kind}", *words]) if words else ""


_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}

FAMILIES: dict[str, Callable[[Config], Model]] = {"gpt2": _gpt2, "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3}
"""What each `model_type` is in a plan."""
