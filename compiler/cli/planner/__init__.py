"""`scalec plan`: the plans of a model for a number of GPUs, searched, priced and compiled.

Purpose: a space of choices, thinned by arithmetic, ranked in closed form, then compiled, the best
of them proved.  Non-goals: seconds and bytes of a compiled plan (`analysis.time`,
`analysis.memory`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ...config.gpus import GIB
from ...frontend import resolve
from ...reports.time import seconds
from ...syntax.formatter import format_plan
from .exact import Priced, price
from .facts import Facts, Goal
from .plan_text import ModelFile, bare_plan, plan
from .reasons import SECTIONS, Reason, reasons
from .report import Planned
from .search import Tell, search, silent

__all__ = ["Goal", "ModelFile", "Planned", "planned"]


def planned(
    file: ModelFile, goal: Goal, kept: Mapping[str, object], top: int, at: Path, tell: Tell = silent
) -> Planned:
    """The best plans of a model for a goal; the text of the first is that of a plan in the folder
    `at`.

    The search says to `tell` what it begins to do.  Raises PlanError where the model is none.
    """
    facts = Facts(resolve(bare_plan(file, goal)))
    found = search(file, facts, goal, kept, proved=top, tell=tell)
    if not found.fitting:
        return Planned(found, top)
    best = found.fitting[0]
    why = reasons(best, found.priced, partial(price, file, facts, goal), kept)
    source = plan(file, facts, goal, best.choice, _notes(goal, best, why), at)
    return Planned(found, top, why, format_plan(source))


def _notes(goal: Goal, best: Priced, why: tuple[Reason, ...]) -> dict[str, str]:
    """Comments for the sections of a plan."""
    source, room = (
        goal.hardware.source,
        f"{best.needs / GIB:,.1f} of {(best.capacity or 0) / GIB:,.0f} GiB",
    )
    speed = f"{seconds(best.seconds)} a step, {best.tokens:,.0f} tokens/s/GPU, MFU {best.mfu:.1%}"
    notes = {"": f"Found by `scalec plan`, by {source}: {speed}, {room}."}
    for section in SECTIONS:
        lines = [str(it) for it in why if it.section == section]
        notes |= {section: "\n".join(lines)} if lines else {}
    return notes
