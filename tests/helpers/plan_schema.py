"""Whether a plan.json is as its schema says."""

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from scalec.compiler.emit.plan_schema import plan_schema


@cache
def _validator() -> Any:
    Draft202012Validator.check_schema(plan_schema())
    return Draft202012Validator(plan_schema())


def mistakes(text: str) -> list[str]:
    """Differences between a plan.json and its schema."""
    return [
        f"{error.json_path}: {error.message}"
        for error in _validator().iter_errors(json.loads(text))
    ]
