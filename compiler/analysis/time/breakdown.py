"""The seconds of a step by kind and plan line: the result of `step_time`."""

from attrs import frozen

from .clocks import Seconds


@frozen
class StepTime:
    """The seconds of a step, `spent` by kind and plan line; and those in which each group's links are busy, by axes."""

    seconds: float
    spent: Seconds
    sent: Seconds
    rank: int | None = None
    """That along the pipeline's axis, if there is one."""

    @property
    def kinds(self) -> dict[str, float]:
        """The seconds of each kind."""
        found = dict[str, float]()
        for (kind, _), seconds in self.spent.items():
            found[kind] = found.get(kind, 0.0) + seconds
        return found
