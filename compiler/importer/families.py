"""The model types of Hugging Face that our models express."""

from collections.abc import Callable

from .config import Config
from .gemma import gemma2, gemma3
from .gpt2 import gpt2
from .llama import llama, olmo2, qwen2, qwen3
from .text import Model

FAMILIES: dict[str, Callable[[Config], Model]] = {
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "llama": llama,
    "olmo2": olmo2,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
"""By `model_type`, what makes one of our models of a configuration."""
