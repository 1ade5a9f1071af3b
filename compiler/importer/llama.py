"""Llama, OLMo and Qwen, whose configurations are alike.

Defaults are those of their configuration classes in transformers 5.23.
"""

from .common import LONGEST, check_layers, positions, precision
from .config import Config
from .text import Model


def llama(config: Config) -> Model:
    """Llama 2 and 3."""
    config.must_be("attention_bias", False)
    config.must_be("mlp_bias", False)
    config.must_be("pretraining_tp", 1)
    return _decoder(config, "llama.scale", eps=1e-6)


def olmo2(config: Config) -> Model:
    """OLMo 2."""
    config.must_be("attention_bias", False)
    return _decoder(config, "olmo2.scale", eps=1e-5)


def qwen2(config: Config) -> Model:
    """Qwen2 and Qwen2.5."""
    _full_attention(config)
    return _decoder(config, "qwen2.scale", eps=1e-6)


def qwen3(config: Config) -> Model:
    """Qwen3."""
    config.must_be("attention_bias", False)
    _full_attention(config)
    return _decoder(config, "qwen3.scale", eps=1e-6, head_dim=128)


def _full_attention(config: Config) -> None:
    """Qwen's sliding windows are off, whatever their size is; and positions are those of text."""
    config.must_be("use_sliding_window", False)
    config.must_be("use_mrope", False)
    config.take("sliding_window", 0)
    config.take("max_window_layers", 0)


def _decoder(config: Config, file: str, *, eps: float, head_dim: int = 0) -> Model:
    """What Llama and its relatives share; `head_dim` is the default of those that do not derive it."""
    config.must_be("hidden_act", "silu")
    config.leave_out("attention_dropout", 0)
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    layers, (theta, rope) = config.number("num_hidden_layers"), positions(config)
    check_layers(config, layers, "full_attention")
    sizes = {
        "vocab": config.number("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", heads),
        "ffn": config.number("intermediate_size"),
        "layers": layers,
        "eps": config.number("rms_norm_eps", eps),
        "theta": theta,
    }
    dim = config.number("head_dim", head_dim or hidden / heads)
    derived = not head_dim and dim * heads == hidden
    return Model(
        file,
        sizes if derived else {**sizes, "head_dim": dim},
        config.number("initializer_range", 0.02),
        min(LONGEST, int(config.number("max_position_embeddings", 2048))),
        precision(config),
        tied=bool(config.take("tie_word_embeddings", False)),
        rope=rope,
    )
