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
    parts = (error.filename, error.strerror or error)
    return _printable(": ".join(str(part) for part in parts if part))


def _printable(line: str) -> str:
    """The line, with control characters escaped, which names out of files may have."""
    printable = list[str]()
    for character in line:
        if character.isprintable():
            printable.append(character)
        else:
            printable.append(character.encode("unicode_escape").decode())
    return "".join(printable)


def quote_first_names(names: Sequence[str]) -> str:
    """The first few of many names."""
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    if len(names) > _SHOWN:
        return f"{shown} and {len(names) - _SHOWN} more"
    return shown


def count_with_noun(number: int, noun: str) -> str:
    """A number and its noun, for instance `1 rank`, `2 ranks`."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}s"
