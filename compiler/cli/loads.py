"""The command `loads`: which experts the tokens of a run chose, step by step, as a table or a picture."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Command, file_path
from .streams import UsageError

if TYPE_CHECKING:
    from ..reports.expert_load import Loads

LOG = "log.jsonl"


def loads(options: Namespace) -> None:
    """`scalec loads`."""
    from ..reports.expert_load import MARK, svg, text
    from .schedule import check_replaceable, replace

    found = _read(options.run / LOG if options.run.is_dir() else options.run)
    if options.svg is None:
        print(text(found))
        return
    drawn = svg(found)
    check_replaceable(options.svg, drawn, "svg", MARK)
    replace(options.svg, drawn, "svg")
    print(f"wrote {options.svg}")


def _read(log: Path) -> "Loads":
    """The loads of a run's log.  Raises UsageError."""
    from ..reports.expert_load import read

    try:
        found = read(log.resolve().parent.name, log.read_text(encoding="utf-8"))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{log}`: {why}; name the folder of a run, such as runs/NAME") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"`{log}` is no log of a run: a line of it is no record of a step") from error
    if found is None:
        raise UsageError(f"`{log}` has no loads of experts: the plan has no `route`, or no step is logged yet")
    return found


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=file_path, metavar="RUN", help="the folder of a run, or its log.jsonl")
    parser.add_argument("--svg", type=file_path, metavar="FILE", help="write a picture")


COMMAND = Command(
    "loads",
    loads,
    _arguments,
    "draw the loads of experts in a run",
    "Draws which experts the tokens of a run chose, from its log: the least and the most load of each layer at\n"
    "some steps; or writes a picture of all experts over all logged steps.  A load is an expert's part of the\n"
    "choices of its layer, in equal shares: 1 where all experts are chosen as often.",
    "scalec loads runs/08_experts --svg loads.svg",
)
