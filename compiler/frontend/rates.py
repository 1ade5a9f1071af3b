"""Learning rates that contradict each other.

Non-goals: how they go from step to step (`runtime.schedule`).
"""

from ..config.settings import Train
from ..syntax.diagnostics import Diagnostic, Note, PlanError


def check_rates(train: Train) -> None:
    """Raises PlanError where a schedule would fall to more than it begins with."""
    optimizer, schedule = train.optimizer, train.optimizer.schedule
    if schedule.floor > optimizer.lr:
        message = f"the learning rate falls to {schedule.floor:g}, from {optimizer.lr:g}"
        notes = (Note(optimizer.spans["lr"], "the peak"),)
        help = "`floor` is the learning rate at the last step, not a share of `lr`"
        raise PlanError([Diagnostic("E0416", message, schedule.spans["floor"], "more than the peak", notes, help)])
