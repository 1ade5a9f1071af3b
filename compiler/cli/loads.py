"""The command `loads`: which experts the tokens of a run chose, step by step, as a table or a picture."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

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
