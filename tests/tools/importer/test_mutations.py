"""Configurations changed at random: each is a plan that compiles, or mistakes that are told at
the configuration.
"""

import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest

from helpers.published_configs import PUBLISHED
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.tools.importer import import_config

EACH = 30
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 5, 7, 33, 64, 100, 4096, 2**16 + 1, 2**31, 2**32, 2**48, 2**63, 10**400, -1, -0.5,
    0.0, 0.1, 0.25, 0.999, 1.0, 1.5, 1e-6, 1e-30, 1e-300, 1e6, 1e30, 1e300, float("nan"), float("inf"), "", "yes",
    "gelu", "silu", "float32", "llama3", "linear", "\ud800\x1b[31m", "é" * 100, [], [1], ["LlamaModel"], {}, {"a": 1},
    {"rope_type": ("llama3")}, {"rope_type": ("linear"), "factor": 2}, {"type": ("yarn")}, {"full_attention": None},
]  # fmt: skip
FIELDS = [
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "head_dim",
    "dtype",
    "sliding_window",
    "quantization_config",
]
KINDS = {fields["model_type"]: fields for fields, _ in PUBLISHED}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_configuration_is_a_plan_or_told_of(kind: str) -> None:
    random = Random(kind)
    for _ in range(EACH):
        text = _mutated(KINDS[kind], random)
        try:
            plan = import_config(Source("config.json", text))
        except PlanError as error:
            for found in error.diagnostics:
                places = [found.span, *(note.span for note in found.notes if note.span)]
                assert found.code.startswith("E08"), f"{found}\n{text}"
                assert {place.path for place in places} == {"config.json"}, f"{found}\n{text}"
                assert str(found)
        else:
            compile_plan(Source("plan.scale", plan))


def _mutated(fields: dict[str, Any], random: Random) -> str:
    """The text of a configuration of which one to three things are changed; of one in eight, a
    letter too.
    """
    changed = deepcopy(fields)
    for _ in range(random.randint(1, 3)):
        tables = [changed, *(value for value in changed.values() if isinstance(value, dict))]
        table = random.choice(tables)
        name = random.choice(
            [*table, *FIELDS] if table is changed else [*table, "factor", "rope_theta"]
        )
        if random.random() < 0.1:
            table.pop(name, None)
        else:
            table[name] = deepcopy(random.choice([*VALUES, _near(table.get(name), random)]))
    text = json.dumps(changed, indent=2)
    if random.random() < 1 / 8:
        at = random.randrange(len(text))
        text = text[:at] + random.choice(['"', "{", "]", "", "\0", ",", "é"]) + text[at + 1 :]
    return text


def _near(value: Any, random: Random) -> Any:
    """A number like this one."""
    return random.choice([value * 2, value // 2, value + 1]) if type(value) is int else value
