"""What configurations of several models share: rotary positions and element types."""

import json
from typing import Any, cast

from ..diagnostics import listing
from .config import Config, is_number
from .text import shown

LONGEST = 4096
"""Tokens of the sequences that a plan is written for, if the model takes so many."""

PRECISIONS = {"float32": "fp32", "float64": "fp64"}
"""What is stored in any other type trains in bf16, which keeps fp32 masters."""

SCALINGS: dict[str, dict[str, str]] = {
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


def precision(config: Config) -> str:
    """The setting `precision`, by the type that the weights are stored in."""
    stored = config.take("torch_dtype", ""), config.take("dtype", "")
    return PRECISIONS.get("".join(map(str, stored)), "bf16")


def positions(config: Config) -> tuple[float, str]:
    """Theta, and what `rope` is given besides; later files say in one field what earlier ones say in two."""
    field = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    return rope_of(config, field, config.table(field), config.number("rope_theta", 1e4))


def rope_of(config: Config, field: str, options: object, theta: float) -> tuple[float, str]:
    """The same of options that a field gives; `theta` is that of a field of its own."""
    given: dict[str, Any] = (
        cast("dict[str, Any]", options) if isinstance(options, dict) else {"type": cast(Any, options)}
    )
    theta = given.get("rope_theta", theta)
    kind = str(given.get("rope_type", given.get("type", "default")))
    words = SCALINGS.get(kind, {})
    numbers = {key: value for key, value in given.items() if key not in ("rope_theta", "rope_type", "type")}
    if kind not in SCALINGS or numbers.keys() != words.keys() or not all(map(is_number, (theta, *numbers.values()))):
        help = f"a plan is written for {listing(SCALINGS)} alone"
        config.wrong(field, f"rotary positions of type `{kind}`: {json.dumps(given)}", help)
        return 1, ""
    more = [f"{ours}={shown(numbers[theirs])}" for theirs, ours in words.items()]
    return theta, ", ".join([f"scaling={kind}", *more]) if more else ""


def check_layers(config: Config, count: float, *pattern: str) -> None:
    """Layers take turns in their attention as `pattern` says, if the configuration says anything of it."""
    given: object = config.take("layer_types", None)
    if given is None:
        return
    layers = cast("list[object]", given) if isinstance(given, list) else []
    if len(layers) != count or any(kind != pattern[i % len(pattern)] for i, kind in enumerate(layers)):
        config.wrong(
            "layer_types", "layers take turns otherwise", f"a plan is written for {', '.join(pattern)}, in turn"
        )
