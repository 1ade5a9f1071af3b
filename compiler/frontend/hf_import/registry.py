"""The model types of Hugging Face that our models express."""

from collections.abc import Callable

from attrs import frozen

from .config import Config
from .gemma import gemma, gemma2, gemma3
from .gpt import gpt2, gpt_neox, gptj
from .llama import llama, mistral, olmo2, phi3, qwen2, qwen3, starcoder2
from .masked import distilbert
from .plan_text import Model


@frozen
class Family:
    """The class of transformers that is the language model, and what makes a configuration one of our models."""

    architecture: str
    model: Callable[[Config], Model]


FAMILIES: dict[str, Family] = {
    "distilbert": Family("DistilBertForMaskedLM", distilbert),
    "gemma": Family("GemmaForCausalLM", gemma),
    "gemma2": Family("Gemma2ForCausalLM", gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma3),
    "gpt2": Family("GPT2LMHeadModel", gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", gpt_neox),
    "gptj": Family("GPTJForCausalLM", gptj),
    "llama": Family("LlamaForCausalLM", llama),
    "mistral": Family("MistralForCausalLM", mistral),
    "olmo2": Family("Olmo2ForCausalLM", olmo2),
    "phi3": Family("Phi3ForCausalLM", phi3),
    "qwen2": Family("Qwen2ForCausalLM", qwen2),
    "qwen3": Family("Qwen3ForCausalLM", qwen3),
    "starcoder2": Family("Starcoder2ForCausalLM", starcoder2),
}
"""By `model_type`."""
