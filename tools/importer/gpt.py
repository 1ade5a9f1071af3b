"""GPT-2, GPT-J, GPT-NeoX and DistilBERT, whose configurations have names of their own.

Defaults are as in their configuration classes in transformers 5.23."""

from .config import Config
from .fields import GELU_TANH, model_of, positions
from .llama import MASK
from .plan_text import Model


def gpt2(config: Config) -> Model:
    """GPT-2, whose positions are learned."""
    for name in (
        "add_cross_attention",
        "reorder_and_upcast_attn",
        "scale_attn_by_inverse_layer_idx",
    ):
        config.must_be(name, False)
    config.must_be("tie_word_embeddings", True)
    sizes = _sizes(config, vocab=50257, hidden=768, heads=12, layers=12, dropout=0.1)
    config.quotient("n_embd", "n_head")
    model = model_of(
        config, "gpt2.scale", sizes, limit="n_positions", most=1024, learned=True, tied=None
    )
    config.must_be("n_ctx", model.seq)
    return model


def gptj(config: Config) -> Model:
    """GPT-J, whose attention and MLP are side by side."""
    config.must_be("rotary", True)
    sizes = _sizes(config, vocab=50400, hidden=4096, heads=16, layers=28, dropout=0)
    rotary, dim = config.size("rotary_dim", 64), config.quotient("n_embd", "n_head")
    if dim and (rotary % 2 or rotary > dim):
        message, label = f"{rotary} dims of a head cannot be rotated in pairs", f"{rotary} of {dim}"
        config.misfit(message, "rotary_dim", "n_head", "n_embd", label=label)
    replaced = {", theta, rotary)": ", theta)"} if rotary == dim else {}
    return model_of(
        config, "gptj.scale", {**sizes, "rotary": rotary}, limit="n_positions", replaced=replaced
    )


def _sizes(
    config: Config, *, vocab: int, hidden: int, heads: int, layers: int, dropout: float
) -> dict[str, float]:
    """Settings that GPT-2 and GPT-J share, with these defaults."""
    config.must_be("activation_function", *GELU_TANH)
    config.must_be("scale_attn_weights", True)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        config.leave_out(name, dropout)
    hidden = config.size("n_embd", hidden)
    return {
        "vocab": config.size("vocab_size", vocab),
        "hidden": hidden,
        "heads": config.size("n_head", heads),
        "ffn": config.size("n_inner", 4 * hidden, null=4 * hidden),
        "layers": config.layers("n_layer", layers),
        "eps": config.number("layer_norm_epsilon", 1e-5),
    }


def gpt_neox(config: Config) -> Model:
    """GPT-NeoX and Pythia; attention and MLP are side by side, unless a configuration says that
    they follow.
    """
    config.must_be("attention_bias", True)
    config.take("is_decoder")  # nothing reads it
    for name in (
        "attention_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout",
        "hidden_dropout_prob",
    ):
        config.leave_out(name, 0)
    replaced = dict[str, str]()
    if config.must_be("hidden_act", "gelu", *GELU_TANH) != "gelu":
        replaced["b_in[ffn])"] = "b_in[ffn], approximate=tanh)"
    if not config.flag("use_parallel_residual", True):
        replaced["layernorm(x, norm2"] = "layernorm(x + o, norm2"
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    dim = config.quotient("hidden_size", "num_attention_heads")
    config.must_be("head_dim", dim, None)
    rope = positions(config, dim, theta="rotary_emb_base", part="rotary_pct", default=0.25)
    sizes = {
        "vocab": config.size("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "ffn": config.size("intermediate_size"),
        "layers": config.layers("num_hidden_layers"),
        "eps": config.number("layer_norm_eps", 1e-5),
        "theta": rope.theta,
        "rotary": rope.dims,
    }
    replaced |= {**rope.get_replacements("rotary"), MASK: f"{MASK}{rope.scale(dim)}"}
    return model_of(config, "gpt_neox.scale", sizes, replaced=replaced)


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
    return model_of(
        config, "distilbert.scale", sizes, most=512, learned=True, tied=None, masked=True
    )
