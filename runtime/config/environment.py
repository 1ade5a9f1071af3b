"""The environment variables of a run: SCALEC_…."""

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ..errors import RunError

_RECORD, _SANITIZE, _PROFILE, _STEPS = (
    "SCALEC_RECORD",
    "SCALEC_SANITIZE",
    "SCALEC_PROFILE",
    "SCALEC_PROFILE_STEPS",
)
_LOG = "SCALEC_LOG"
_KNOWN = (_RECORD, _SANITIZE, _PROFILE, _STEPS, _LOG, "SCALEC_DUMP", "SCALEC_NO_CACHE")


def recording() -> bool:
    """Whether SCALEC_RECORD=1 asks for a record of every collective.  RunError."""
    return _is_on(_RECORD)


def sanitizing() -> bool:
    """Whether SCALEC_SANITIZE=1 asks that copies be compared.  RunError."""
    return _is_on(_SANITIZE)


def tracing() -> bool:
    """Whether SCALEC_LOG=trace asks for a line about each collective.  RunError."""
    value = os.environ.get(_LOG, "")
    if value not in ("", "trace"):
        raise RunError(f"{_LOG} is `{value}`: write trace, or leave it out")
    return value == "trace"


@dataclass(frozen=True)
class Profiled:
    """Which steps of a run are profiled, from `first` to `last`, counted from 1, and the folder
    that profiles are written to.
    """

    folder: Path
    first: int
    last: int


def profiling() -> Profiled | None:
    """The request of SCALEC_PROFILE=FOLDER, with SCALEC_PROFILE_STEPS=N-M.  RunError."""
    folder, steps = os.environ.get(_PROFILE), os.environ.get(_STEPS)
    if not folder and steps:
        raise RunError(
            f"{_STEPS}={steps} says which steps are profiled: it needs {_PROFILE}=FOLDER"
        )
    if not folder:
        return None
    first, _, last = (steps or "3-5").partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise RunError(
            f"{_STEPS} is `{steps}`: write the first and the last step of the run, as in 3-5"
        )
    return Profiled(Path(folder), int(first), int(last))


def unknown_variable_lines() -> list[str]:
    """A line for each variable SCALEC_… that asks for nothing.

    RunError if one that is known has an unknown value.
    """
    for asked in (recording, sanitizing, tracing, profiling):
        asked()
    lines = list[str]()
    unknown_names = [
        name for name in os.environ if name.startswith("SCALEC_") and name not in _KNOWN
    ]
    for name in sorted(unknown_names):
        advice = f"there are {', '.join(_KNOWN)}"
        if close := get_close_matches(name, _KNOWN, 1, 0.8):
            advice = f"did you mean {close[0]}?"
        lines.append(f"warning: there is no {name}: {advice}")
    return lines


def _is_on(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise RunError(f"{name} is `{value}`: write 1, or 0 for a run without")
    return value == "1"
