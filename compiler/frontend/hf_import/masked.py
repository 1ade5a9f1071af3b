"""DistilBERT, which learns from masked tokens.

Defaults are those of its configuration class in transformers 5.23.
"""

from .config import Config
from .fields import deviation, precision
from .plan_text import Model


def distilbert(config: Config) -> Model:
    """DistilBERT with its head, whose positions are learned."""
    config.must_be("activation", "gelu")
    config.must_be("sinusoidal_pos_embds", False)  # such are not trained
    for name in ("tie_weights_", "tie_word_embeddings"):
        config.must_be(name, True)
    for name in ("attention_dropout", "dropout"):
        config.leave_out(name, 0.1)
    sizes = {
        "vocab": config.size("vocab_size", 30522),
        "hidden": config.size("dim", 768),
        "heads": config.size("n_heads", 12),
        "ffn": config.size("hidden_dim", 3072),
        "layers": config.layers("n_layers", 6),
    }
    config.quotient("dim", "n_heads")
    seq = config.size("max_position_embeddings", 512)
    return Model("distilbert.scale", sizes, deviation(config), seq, precision(config), masked=True)
