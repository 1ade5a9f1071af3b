"""Errors that a user can fix: one clear line instead of a traceback."""

from collections.abc import Sequence

_SHOWN = 3  # names of a list


class RunError(Exception):
    """An error and its remedy, in one line; `more` lines are indented below it."""

    def __init__(self, line: str, *more: str) -> None:
        super().__init__("\n  ".join(map(_printable, (line, *more))))


def reason(error: RunError | OSError) -> str:
    """The line to print: for an error of the system, the file and why it refuses."""
    if isinstance(error, RunError):
        return str(error)
    return _printable(
        ": ".join(str(each) for each in (error.filename, error.strerror or error) if each)
    )


def _printable(line: str) -> str:
    """The line, with control characters escaped, which names out of files may have."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in line
    )


def named(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more


def counted(number: int, noun: str) -> str:
    """For instance `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
