"""From the configuration of a Hugging Face model (`config.json`) to a plan that trains the same
model.

A plan with the model in it, one file to read and change: the text of a model of `plans/models` with
the configuration's sizes.  A field that no plan can express is an error at its place; one that
transformers does not read is named in the plan.  None is left out in silence."""

from collections.abc import Callable

from ...compiler.syntax.diagnostics import did_you_mean, listing
from ...compiler.syntax.source import Source
from .config import TEXT, Config, as_json
from .deepseek import deepseek_v3
from .gemma import gemma, gemma2, gemma3
from .gpt import distilbert, gpt2, gpt_neox, gptj
from .llama import llama, mistral, mixtral, olmo2, olmoe, phi3, qwen2, qwen3, qwen3_moe, starcoder2
from .plan_text import Model, plan_text

GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

FAMILIES: dict[str, tuple[str, Callable[[Config], Model]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", deepseek_v3),
    "distilbert": ("DistilBertForMaskedLM", distilbert),
    "gemma": ("GemmaForCausalLM", gemma),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3),
    "gpt2": ("GPT2LMHeadModel", gpt2),
    "gpt_neox": ("GPTNeoXForCausalLM", gpt_neox),
    "gptj": ("GPTJForCausalLM", gptj),
    "llama": ("LlamaForCausalLM", llama),
    "mistral": ("MistralForCausalLM", mistral),
    "mixtral": ("MixtralForCausalLM", mixtral),
    "olmo2": ("Olmo2ForCausalLM", olmo2),
    "olmoe": ("OlmoeForCausalLM", olmoe),
    "phi3": ("Phi3ForCausalLM", phi3),
    "qwen2": ("Qwen2ForCausalLM", qwen2),
    "qwen3": ("Qwen3ForCausalLM", qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe),
    "starcoder2": ("Starcoder2ForCausalLM", starcoder2),
}
"""The class of transformers that is the language model, and what makes a configuration one of
ours, by `model_type`.
"""


ALIASES: dict[str, dict[str, str]] = {
    "deepseek_v3": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    "distilbert": {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    "gpt2": GPT_ALIASES,
    "gptj": GPT_ALIASES,
    "mixtral": {"num_experts": "num_local_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""Other names that transformers has for a field (`attribute_map` of its classes), and ours, by
`model_type`.
"""


def import_config(source: Source) -> str:
    """The plan of a configuration.  Raises PlanError."""
    config = Config(source)
    kind: str = config.get_field("model_type", TEXT)
    config.diagnostics.check()
    if kind not in FAMILIES:
        help = did_you_mean(kind, FAMILIES) or f"there are {listing(FAMILIES)}"
        config.wrong("E0801", f"there is no model for `{kind}`", "model_type", help=help)
        config.diagnostics.check()
    wanted, make = FAMILIES[kind]
    architectures: object = config.take("architectures")
    # a class may be left out, but others have other outputs than a plan
    if architectures not in (None, [], [wanted]):
        message = f"`architectures` is `{as_json(architectures)}`: this is not a language model"
        config.wrong("E0801", message, "architectures", help=f"a plan is written for `{wanted}`")
    for alias, name in ALIASES.get(kind, {}).items():
        config.merge(alias, name)
    model = make(config)
    config.check()
    config.diagnostics.check()
    return plan_text(kind, model, config.left_out, config.unread)
