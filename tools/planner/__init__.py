"""`scalec plan`: the plans of a model for a number of GPUs, searched, priced and compiled.

Purpose: a space of choices is thinned by arithmetic, ranked in closed form, then compiled; the best
plans are proved.  Non-goals: seconds and bytes of a compiled plan (`analysis.time`,
`analysis.memory`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ...compiler.config.gpus import GIB
from ...compiler.frontend import resolve
from ...compiler.reports.time import seconds
from ..formatter import format_plan
from .exact import Priced, price
from .facts import Facts, Goal
from .plan_text import ModelFile, bare_plan, plan
from .reasons import SECTIONS, Reason, reasons
from .report import Planned
from .search import Tell, search, silent

__all__ = ["Goal", "ModelFile", "Planned", "find_plans"]


def find_plans(
    file: ModelFile,
    goal: Goal,
    kept: Mapping[str, object],
    top: int,
    folder: Path,
    tell: Tell = silent,
) -> Planned:
    """The best plans of a model for a goal; the text of the first is a plan that lies in `folder`.

    The search calls `tell` with a line before each of its steps.  Raises PlanError where the file
    has no model.
    """
    facts = Facts(resolve(bare_plan(file, goal)))
    result = search(file, facts, goal, kept, proved=top, tell=tell)
    if not result.fitting:
        return Planned(result, top)
    best = result.fitting[0]
    why = reasons(best, result.priced, partial(price, file, facts, goal), kept)
    source = plan(file, facts, goal, best.choice, _notes(goal, best, why), folder)
    return Planned(result, top, why, format_plan(source))


def _notes(goal: Goal, best: Priced, why: tuple[Reason, ...]) -> dict[str, str]:
    """Comments for the sections of a plan."""
    room = f"{best.needs / GIB:,.1f} of {(best.capacity or 0) / GIB:,.0f} GiB"
    speed = f"{seconds(best.seconds)} a step, {best.tokens:,.0f} tokens/s/GPU, MFU {best.mfu:.1%}"
    notes = {"": f"Found by `scalec plan`, by {goal.hardware.source}: {speed}, {room}."}
    for section in SECTIONS:
        lines = [str(reason) for reason in why if reason.section == section]
        if lines:
            notes[section] = "\n".join(lines)
    return notes
