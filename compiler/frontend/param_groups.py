"""Groups of parameters by patterns of their names, as the optimizer and `state` have them.

Non-goals: what a group has of its own.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing
from ..syntax.source import Span


def check_groups(groups: Iterable[tuple[Sequence[str], Span]], names: Sequence[str], found: Diagnostics) -> None:
    """Every pattern of a group matches a parameter, and no parameter is in two groups; spans are of their patterns."""
    owner: dict[str, Span] = {}
    for patterns, span in groups:
        for pattern in patterns:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                help = did_you_mean(pattern, names) or f"parameters are {listing(names)}"
                found.error("E0407", f"`{pattern}` matches no parameter", span, help=help)
            for name in matched:
                if (first := owner.setdefault(name, span)) is not span:
                    notes = [Note(first, "the first group")]
                    found.error("E0408", f"parameter `{name}` is in two groups", span, "matched again", notes=notes)
