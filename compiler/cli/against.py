"""`scalec explain time PLAN --against FOLDER`: steps that a run has profiled, beside the prediction."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from .compile import Plan
from .streams import UsageError

if TYPE_CHECKING:
    from ..analysis.time.profile import Profile
    from ..reports.chrome_trace import Event

TRACE = re.compile(r"rank(\d+)\.json")
"""The name of the trace of a rank."""


def against(plan: Plan, folder: Path) -> str:
    """The table by plan line; without a prediction where the steps ran on another device than the plan's."""
    from ..analysis.memory import account
    from ..analysis.time.expected import expected
    from ..analysis.time.profile import beside, ranks_at
    from ..reports.profile import table

    found = expected(plan.program)
    profile = read(folder, ranks_at(plan.program, found.step.rank if found else None))
    of = found if profile.device == account(plan.program).device else None
    return table(profile, beside(profile, of.step if of else None), of)


def recorded_steps(folder: Path) -> "list[Event]":
    """A step of each rank whose trace lies in the folder.  Raises UsageError."""
    from ..reports.time_trace import recorded

    found: list[Event] = []
    for path in sorted(folder.glob("rank*.json")):
        if rank := TRACE.fullmatch(path.name):
            try:
                found += recorded(int(rank[1]), path.read_text(encoding="utf-8"))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                raise UsageError(f"`{path}` is no trace that a run of this scalec has recorded") from None
    if not found:
        raise UsageError(f"`{folder}` has no trace: train with SCALEC_PROFILE={folder}, then name it here")
    return found


def read(folder: Path, ranks: list[int]) -> "Profile":
    """The profile in a folder, of these ranks if it has any of them.  Raises UsageError."""
    from ..analysis.time.profile import read_profile

    try:
        profile = read_profile(folder, ranks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"`{folder}` has sums of a profile that no run of this scalec wrote") from None
    if profile is None:
        raise UsageError(f"`{folder}` has no profile: train with SCALEC_PROFILE={folder}, then name it here")
    return profile
