"""A turn's weights as the model computes with them: gathered from the ranks' parts, perhaps freed between uses.

Gathers are begun ahead of their use and go on while the model computes; who uses the weights waits for them first.

Non-goals: when to begin and when to free (`flows`); masters and optimizer state (`flat`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..comm.mesh import Axis, End


@dataclass(frozen=True, slots=True)
class _Gather:
    """One under way."""

    work: Any
    axis: Axis
    line: Any  # of the program, in a sanitized run
    end: End


class Working:
    """The weights, `whole`, and this rank's `part`, from which they are gathered.

    Where they come and go, `part` is memory of its own, and from `free` to the next gather the whole has none;
    elsewhere the part lies in the whole.  `before` and `after` are the turns around this one, of which `prefetch` are
    gathered ahead of their use.
    """

    def __init__(self, whole: Tensor, part: Tensor, comes_and_goes: bool, prefetch: int) -> None:
        self.whole, self.part, self.comes_and_goes = whole, part, comes_and_goes
        self.before: Working | None = None
        self.after: Working | None = None
        self._prefetch = prefetch
        self._gather: _Gather | None = None

    @property
    def is_freed(self) -> bool:
        """Whether it has no memory: no gather has been begun since it was freed."""
        return self.whole.untyped_storage().nbytes() == 0

    def upcoming(self, backwards: bool) -> Iterator["Working"]:
        """This turn, and those that come next: what should be under way when it is used."""
        turn: Working | None = self
        for _ in range(1 + self._prefetch):
            if turn is None:
                return
            yield turn
            turn = turn.before if backwards else turn.after

    def begin(self, axis: Axis, line: Any, end: End) -> None:
        """Begins to gather."""
        if self.is_freed:
            reserve(self.whole)
        self._gather = _Gather(axis.group._allgather_base(self.whole, self.part), axis, line, end)

    def arrive(self) -> None:
        """Waits for the gather that was begun, if one was: from here on the weights may be used."""
        if (gather := self._gather) is None:
            return
        gather.work.wait()
        self._gather = None
        if gather.axis.watch is not None:
            gather.axis.watch.coerced(self.whole, gather.axis, gather.line, gather.end)

    def free(self) -> None:
        """Gives the memory back until the next gather; all uses are over."""
        if self.comes_and_goes:
            release(self.whole)

    def abandon(self) -> None:
        """Ends what a pass that was not finished has left: a gather under way would write to memory that is gone."""
        self.arrive()
        self.free()


def reserve(x: Tensor) -> None:
    """Gives a tensor without memory its memory; its values are undefined."""
    x.untyped_storage().resize_(x.nbytes)


def release(x: Tensor) -> None:
    """Takes a tensor's memory: it, and what is a view of it, keep their shapes."""
    x.untyped_storage().resize_(0)
