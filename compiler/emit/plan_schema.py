"""The JSON Schema of `plan.json`: plan.schema.json, with the settings that the compiler knows."""

import json
from pathlib import Path
from typing import Any

from ..config.schema import DIALECT, settings_schema


def plan_schema() -> dict[str, Any]:
    """The schema of the version that `plan_json.SCHEMA` names."""
    schema = json.loads(Path(__file__).with_name("plan.schema.json").read_bytes())
    settings = settings_schema()
    of_settings = {key: settings[key] for key in ("type", "properties", "additionalProperties")}
    return {
        "$schema": DIALECT,
        **schema,
        "$defs": schema["$defs"] | {"settings": of_settings} | settings["$defs"],
    }
