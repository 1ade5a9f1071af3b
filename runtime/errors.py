"""The one exception for what a user can put right: a single clear line instead of a traceback."""

from collections.abc import Sequence

_SHOWN = 3  # names of a list


class RunError(Exception):
    """What is wrong and what to do, in one line: what cannot be printed, as in names out of files, is escaped."""

    def __init__(self, line: str) -> None:
        super().__init__("".join(each if each.isprintable() else _escaped(each) for each in line))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def reason(error: OSError) -> str:
    """Why the system refuses, and of which file."""
    return ": ".join(map(str, filter(None, (error.filename, error.strerror or str(error)))))


def named(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more
