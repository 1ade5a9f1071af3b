"""Steps of all ranks that succeed on all or fail on all, with the error of the first rank that
failed.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..comm.store import meet
from ..errors import RunError, reason

_T = TypeVar("_T")


def together(do: Callable[[], _T], name: str = "together", store: Any = None) -> _T:
    """`do()`, then waits for all ranks.  RunError on all if one has met such, or an OSError.

    All ranks call it in one order.  Another thread than the main one has a `name` and a `store` of
    its own.
    """
    done, failure = list[_T](), ""
    try:
        done.append(do())
    except (RunError, OSError) as error:
        failure = reason(error)
    if failed := [each for each in meet(name, failure, store) if each]:
        raise RunError(*map(str.strip, failed[0].splitlines()))
    return done[0]


def of_node(do: Callable[[], str]) -> str:
    """A word that the first rank of each node makes, and rank 0, on all ranks.  RunError on all.
    All ranks call it.

    Where nodes have other words, ranks that make none have that of the first node.
    """
    makes = "0" in (os.environ.get("LOCAL_RANK", "0"), os.environ.get("RANK", "0"))
    own = together(lambda: do() if makes else "")
    words = meet("of node", own)
    return own or next(word for word in words if word)


def anywhere(marks: list[bool]) -> list[bool]:
    """Which marks are set on some rank: as many on each.  All ranks call it."""
    found = meet("anywhere", "".join(map(str, map(int, marks))))
    return [any(word[i] == "1" for word in found) for i in range(len(marks))]
