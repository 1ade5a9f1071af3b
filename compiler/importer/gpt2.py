"""GPT-2, whose fields have names of their own.

Defaults are those of its configuration class in transformers 5.23.
"""

from .common import precision
from .config import Config
from .text import Model


def gpt2(config: Config) -> Model:
    """GPT-2."""
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
    return Model("gpt2.scale", sizes, config.number("initializer_range", 0.02), int(positions), precision(config))
