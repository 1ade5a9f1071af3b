"""The command `schema`: the JSON Schema of settings, or of plan.json."""

import json
from argparse import ArgumentParser, Namespace

from .command import Command
from .output import as_file

OF = ("settings", "plan")


def schema(options: Namespace) -> None:
    """`scalec schema settings | plan`."""
    from ..config.schema import settings_schema
    from ..emit.plan_schema import plan_schema

    make_schema = {"settings": settings_schema, "plan": plan_schema}[options.of]
    content = make_schema()
    as_file()
    print(json.dumps(content, indent=2, ensure_ascii=False))


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("of", choices=OF, metavar="settings|plan", help="the thing to describe")


COMMAND = Command(
    schema,
    _arguments,
    "settings: all sections of settings, with the meaning, range and default of each.\n"
    "plan: the file plan.json that `scalec compile` writes.",
    "scalec schema settings",
)
