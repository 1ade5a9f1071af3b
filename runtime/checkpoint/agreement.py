"""Steps that succeed on all ranks or fail on all, with the error of the first rank that failed."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..comm.store import meet
from ..errors import RunError, reason

_T = TypeVar("_T")


def together(do: Callable[[], _T], name: str = "together", store: Any = None) -> _T:
    """Returns `do()`, after all ranks have done it.

    RunError on all ranks if `do` raises a RunError or an OSError on one.  All ranks call it in the
    same order.  A thread other than the main one passes its own `name` and `store`.
    """
    results, failure = list[_T](), ""
    try:
        results.append(do())
    except (RunError, OSError) as error:
        failure = reason(error)
    failures = [text for text in meet(name, failure, store) if text]
    if failures:
        raise RunError(*map(str.strip, failures[0].splitlines()))
    return results[0]


def word_of_node(do: Callable[[], str]) -> str:
    """Gives all ranks the word that the first rank of each node makes; rank 0 makes one too.

    RunError on all ranks.  All ranks call it.  Where nodes make different words, ranks that make
    none get the first node's.
    """
    makes = "0" in (os.environ.get("LOCAL_RANK", "0"), os.environ.get("RANK", "0"))
    own_word = together(lambda: do() if makes else "")
    words = meet("of node", own_word)
    return own_word or next(word for word in words if word)


def anywhere(marks: list[bool]) -> list[bool]:
    """Which marks are set on some rank.  All ranks call it, with equally many marks."""
    digits_of_ranks = meet("anywhere", "".join(map(str, map(int, marks))))
    is_set = list[bool]()
    for position in range(len(marks)):
        is_set.append(any(digits[position] == "1" for digits in digits_of_ranks))
    return is_set
