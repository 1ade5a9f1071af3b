"""From the configuration of a Hugging Face model (`config.json`) to a plan that trains the same model.

A plan with the model in it, one file to read and change: the text of a model of `plans/models` with the
configuration's sizes.  A field that no plan can express is an error at its place, never left out in silence."""

from collections.abc import Callable

from attrs import frozen

from ...syntax.diagnostics import did_you_mean, listing
from ...syntax.source import Source
from .config import TEXT, Config, as_json
from .deepseek import deepseek_v3
from .experts import mixtral, olmoe, qwen3_moe
from .gemma import gemma, gemma2, gemma3
from .gpt import distilbert, gpt2, gpt_neox, gptj
from .llama import llama, mistral, olmo2, phi3, qwen2, qwen3, starcoder2
from .plan_text import Model, plan_text


@frozen
class Family:
    """The class of transformers that is the language model, and what makes a configuration one of our models."""

    architecture: str
    model: Callable[[Config], Model]


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek_v3),
    "distilbert": Family("DistilBertForMaskedLM", distilbert),
    "gemma": Family("GemmaForCausalLM", gemma),
    "gemma2": Family("Gemma2ForCausalLM", gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma3),
    "gpt2": Family("GPT2LMHeadModel", gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", gpt_neox),
    "gptj": Family("GPTJForCausalLM", gptj),
    "llama": Family("LlamaForCausalLM", llama),
    "mistral": Family("MistralForCausalLM", mistral),
    "mixtral": Family("MixtralForCausalLM", mixtral),
    "olmo2": Family("Olmo2ForCausalLM", olmo2),
    "olmoe": Family("OlmoeForCausalLM", olmoe),
    "phi3": Family("Phi3ForCausalLM", phi3),
    "qwen2": Family("Qwen2ForCausalLM", qwen2),
    "qwen3": Family("Qwen3ForCausalLM", qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe),
    "starcoder2": Family("Starcoder2ForCausalLM", starcoder2),
}
"""By `model_type`."""


def import_config(source: Source) -> str:
    """The plan of a configuration.  Raises PlanError."""
    config = Config(source)
    kind: str = config.read("model_type", TEXT)
    config.found.check()
    if kind not in FAMILIES:
        help = did_you_mean(kind, FAMILIES) or f"there are {listing(FAMILIES)}"
        config.wrong("E0801", f"there is no model for `{kind}`", "model_type", help=help)
        config.found.check()
    family = FAMILIES[kind]
    _is_language_model(config, family.architecture)
    model = family.model(config)
    config.check()
    config.found.check()
    return plan_text(kind, model, config.left_out)


def _is_language_model(config: Config, wanted: str) -> None:
    """A configuration may leave out the class, but not name another: its outputs would not be those of a plan."""
    given: object = config.take("architectures")
    if given not in (None, [], [wanted]):
        message = f"`architectures` is `{as_json(given)}`: this is not a language model"
        config.wrong("E0801", message, "architectures", help=f"a plan is written for `{wanted}`")
