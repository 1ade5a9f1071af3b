"""The JSON Schema of settings: it has each setting, and takes the numbers and words that the
reader takes.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from attrs import asdict
from jsonschema import Draft202012Validator

from scalec.compiler.config.fields import Field, Settings, fields_of
from scalec.compiler.config.schema import SECTIONS, settings_schema
from scalec.compiler.config.values import Value
from scalec.compiler.syntax import tree
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source

SCHEMA = settings_schema()
AT = Source("plan.scale", "x").span(0, 1)
NUMBERS = [-1, 0, 1, 2, 100, 0.5, 1.5, 2**32 - 1, 2**32]
WORDS = [
    "auto",
    "off",
    "on",
    "bf16",
    "fp32",
    "bytes",
    "uint16",
    "torch",
    "none",
    "full",
    "save",
    "padded",
    "nonsense",
]
OTHERS: list[tree.Expr] = [tree.String(word, AT) for word in ("a", "ab", "")]
OTHERS += [tree.Number(1, unit, AT) for unit in ("GiB", "%")]
OTHERS += [tree.List((tree.String("a", AT),), AT)]
OTHERS += [
    tree.List(tuple(tree.Number(number, "", AT) for number in each), AT)
    for each in ([], [0], [0.5, 0.5])
]


def values() -> Iterator[ParameterSet]:
    """The fields that are values, of each class of settings."""
    todo: list[type[Settings]] = [*SECTIONS]
    for cls in todo:
        for field in fields_of(cls):
            if isinstance(field.what, Value):
                yield pytest.param(
                    cls.__name__, field, field.what, id=f"{cls.__name__}.{field.name}"
                )
            else:
                todo.append(field.what.section_class)


def read(value: Value, expr: tree.Expr) -> Any:
    """The value as plan.json has it; None if it does not fit."""
    try:
        found = value.get_value(tree.Name("key", AT), expr)
    except PlanError:
        return None
    return json.loads(json.dumps(found, default=asdict))


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(("cls", "field", "value"), [*values()])
def test_it_takes_what_the_reader_takes(cls: str, field: Field, value: Value) -> None:
    assert field.doc in SCHEMA["$defs"][cls]["properties"][field.name]["description"]
    validator = Draft202012Validator(value.schema)
    numbers = {number: tree.Number(number, "", AT) for number in NUMBERS}
    words = {word: tree.Name(word, AT) for word in WORDS}
    taken = [
        found
        for expr in (*numbers.values(), *words.values(), *OTHERS)
        if (found := read(value, expr)) is not None
    ]
    assert taken
    assert not [found for found in taken if not validator.is_valid(found)]
    alike = (numbers if "type" in value.json and "size" not in value.takes else {}) | (
        words if "enum" in value.json else {}
    )
    assert not [
        raw
        for raw, expr in alike.items()
        if validator.is_valid(raw) != (read(value, expr) is not None)
    ]


def test_unknown_settings_are_refused() -> None:
    validator = Draft202012Validator(SCHEMA)
    assert validator.is_valid({"cluster": {"nodes": 2}})
    assert not validator.is_valid({"cluster": {"node": 2}})
    assert not validator.is_valid({"train": {"seq": 1}})
    assert not validator.is_valid({"cluster": {"nodes": 0}})
