"""What a user is told: the one exception for what they can put right, a single clear line instead of a traceback."""


class RunError(Exception):
    """What is wrong and what to do, in one line."""


def counted(number: int, noun: str) -> str:
    """For instance `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
