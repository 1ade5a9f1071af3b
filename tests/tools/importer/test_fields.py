"""Every field of a class of transformers is read, without effect and named in the plan, or refused
with its reason.

What is a field, and what reads it, is taken from the source of transformers that is installed.
Non-goals: whether a field that is read means the same in the plan (`test_same_numbers`).
"""

import inspect
import json
import re
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from transformers import CONFIG_MAPPING  # pyright: ignore[reportUnknownVariableType]

from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.tools.importer import ALIASES, FAMILIES, import_config
from scalec.tools.importer.config import EFFECTS, ELSEWHERE, NEWEST, READ_BY_LIBRARY

WITHOUT_EFFECT = "# Without effect"
LIBRARY, ROTATED = ("masking_utils", "utils.generic"), "modeling_rope_utils"
"""Modules of transformers that all models share, and that of rotary positions; they read
configurations.
"""

OF_OBJECTS = frozenset(
    """
        get_text_config is_heterogeneous standardize_rope_params validate_rope max_seq_len_cached
        per_layer_config _experts_implementation _experts_implementation_internal json
    """.split()
)
"""What the library reads of a configuration and no file has: methods, and which kernel computes."""

OF_IMAGES = frozenset("image_token_id mm_tokens_per_image text_config vision_config".split())
"""Fields of models with images, whose code is in the same file as that of Gemma 3."""

OF_CLASSIFIERS = frozenset("hidden_dropout summary_last_dropout".split())
"""Fields that only the classes of GPT-2 with other heads read."""


@cache
def defaults(kind: str) -> dict[str, Any]:
    """The fields of a class, with their defaults as a file has them."""
    fields: dict[str, Any] = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    return fields | {
        "model_type": kind,
        "architectures": [FAMILIES[kind][0]],
        "is_encoder_decoder": False,
    }


def imported(fields: dict[str, Any]) -> str:
    """The plan of a configuration."""
    return import_config(Source("config.json", json.dumps(fields, indent=1)))


def other_than(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 1
    if isinstance(value, str):
        return "other"
    return 3 if value is None else {"other": 1}


@cache
def read_by_code(kind: str) -> frozenset[str]:
    """The fields that the code of a model and the shared library read."""
    module = CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")
    own = inspect.getsource(import_module(module))
    shared = (*LIBRARY, ROTATED) if ROTATED in own else LIBRARY
    source = "\n".join(
        [own, *(inspect.getsource(import_module(f"transformers.{name}")) for name in shared)]
    )
    # masks of windows are others' then
    unwindowed = set[str]() if "sliding_window" in own else {"sliding_window"}
    attributes = re.findall(r"\bconfig\.(\w+)", source)
    by_name = re.findall(r"(?:get|has)attr\((?:self\.)?config, \"(\w+)\"", source)
    return frozenset(attributes + by_name) - OF_OBJECTS - OF_IMAGES - unwindowed


def what_becomes_of(kind: str, name: str, value: Any) -> str:
    """`read`, `noted`, `elsewhere`, or the message that refuses the field."""
    fields = defaults(kind)
    try:
        text = imported({**fields, name: value})
    except PlanError as error:
        return str(error)
    lines = [line for line in text.split("\n") if line.startswith(WITHOUT_EFFECT)]
    if any(f'"{name}" =' in line for line in lines):
        return "noted"
    return "elsewhere" if text == imported(fields) else "read"


TAKEN = {  # fields that change no plan by themselves, for the reason given
    "architectures": "checked",
    "model_type": "chooses the model",
    "head_dim": "the sum of others, or its quotient",
    "qk_head_dim": "the sum of others",
    "max_window_layers": "of windows, which are off",
    "sliding_window": "of windows, which are off",
    "original_max_position_embeddings": "of scaled positions",
    "is_decoder": "nothing reads it",
    "ep_size": "of a run",
    "output_router_logits": "whether the loss has that of the routers",
    "router_aux_loss_coef": "of the routers' loss, which is off",
    "intermediate_size": "of layers without experts",
    "max_position_embeddings": "longer than the plan's sequence",
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_defaults_of_a_class_are_a_plan(kind: str) -> None:
    assert "is_encoder_decoder" in imported(defaults(kind))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_is_read_noted_or_refused_with_a_reason(kind: str) -> None:
    """A field is noted only if neither the class nor the library reads it."""
    fields, aliases = defaults(kind), ALIASES.get(kind, {})
    names = {*fields, *read_by_code(kind), *READ_BY_LIBRARY, *aliases} - OF_CLASSIFIERS
    files = sorted(name for name in names if name in fields or not name.startswith("_"))
    found = {name: what_becomes_of(kind, name, other_than(fields.get(name))) for name in files}
    assert not {
        name: became for name, became in found.items() if not is_accounted_for(kind, name, became)
    }


def is_accounted_for(kind: str, name: str, became: str) -> bool:
    """Whether what became of a field is right."""
    if became == "elsewhere":
        return name in ELSEWHERE or name in TAKEN
    if became == "noted":
        return name not in read_by_code(kind) | READ_BY_LIBRARY.keys()
    has_reason = became.startswith("error[E080") and not re.search(
        "take it out|is not known", became
    )
    return became == "read" or has_reason


def test_what_a_class_calls_a_field_by_is_known() -> None:
    for kind in FAMILIES:
        names: dict[str, str] = CONFIG_MAPPING[kind].attribute_map
        ours = ALIASES.get(kind, {})
        for alias, name in names.items():
            assert alias in ours or name in ours, f"{kind}: {alias} is {name}"


def test_what_fields_do_is_said_of_all_that_the_library_reads() -> None:
    assert READ_BY_LIBRARY.keys() <= EFFECTS.keys()


def test_the_importer_knows_the_transformers_that_is_installed() -> None:
    import transformers

    assert tuple(map(int, transformers.__version__.split(".")[:2])) == NEWEST
