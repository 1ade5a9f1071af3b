"""What is raised where a schedule cannot be had."""


class ScheduleError(Exception):
    """A schedule cannot do what it is asked for: why, with the arithmetic, and what it can do instead."""

    def __init__(self, why: str, help: str) -> None:
        super().__init__(why)
        self.why = why
        self.help = help
