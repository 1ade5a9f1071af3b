"""Rows of actions, one for each rank of the pipeline's axis: what a schedule is.

In text `3F12` is stage 3's forward of microbatch 12, as torch.distributed.pipelining writes it."""

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property, wraps
from itertools import chain, pairwise
from typing import TypeVar, cast

from attrs import evolve, field, frozen


class Work(Enum):
    """The work of an action for one stage and one microbatch."""

    FORWARD = "F"
    BACKWARD = "B"  # both parts
    INPUT = "I"  # the part of backward that the stage before waits for
    WEIGHT = "W"  # the part that only the weights need
    SEND_FORWARD = "SEND_F"  # what forward made, to the next stage
    RECEIVE_FORWARD = "RECV_F"  # from the stage before
    SEND_BACKWARD = "SEND_B"  # the gradient of what was received, to the stage before
    RECEIVE_BACKWARD = "RECV_B"  # from the next stage

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.is_message = "_" in letters
        """Whether it moves values between ranks instead of computing."""
        self.sends = letters.startswith("SEND")
        """Whether it is the sending end of a message."""
        self.number = len(type(self).__members__)
        """Its place among these."""


@frozen
class Action:
    """One cell of a row."""

    stage: int
    work: Work
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> "Action | None":
        """The action that a text says, if it says one."""
        match = _TEXT.fullmatch(text)
        if not match:
            return None
        return cls(int(match[1]), Work(match[2]), int(match[3]))

    @property
    def peer(self) -> int:
        """The stage at the other end of a message; there may be no such stage."""
        if self.work in (Work.SEND_FORWARD, Work.RECEIVE_BACKWARD):
            return self.stage + 1
        return self.stage - 1

    def __str__(self) -> str:
        return f"{self.stage}{self.work.letters}{self.microbatch}"


_TEXT = re.compile(rf"([0-9]{{1,9}})({'|'.join(work.value for work in Work)})([0-9]{{1,9}})")


Row = tuple[Action, ...]
_FORWARDS = (Work.FORWARD, Work.SEND_FORWARD, Work.RECEIVE_FORWARD)


@frozen
class ResultCache:
    """A base of values that hold the results of functions that run `once` for each value."""

    known: dict[object, object] = field(
        factory=dict[object, object], init=False, eq=False, repr=False
    )


K = TypeVar("K", bound=ResultCache)
T = TypeVar("T")


def once(function: Callable[[K], T]) -> Callable[[K], T]:
    """A function that runs once for each value, however often it is called: the value keeps the
    result.
    """

    @wraps(function)
    def call_once(value: K) -> T:
        if call_once not in value.known:
            value.known[call_once] = function(value)
        return cast(T, value.known[call_once])

    return call_once


@frozen(slots=False)
class Schedule(ResultCache):
    """The rank of each stage, and the actions of each rank in order."""

    stage_to_rank: tuple[int, ...]
    """The rank of each stage."""
    microbatches: int
    rows: tuple[Row, ...]
    """For each rank, in order."""
    groups: tuple[Row, ...] = ()
    """Messages that begin as one, of all ranks; each other begins alone."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.stage_to_rank)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def words(self) -> tuple[tuple[str, ...], ...]:
        """Each rank's actions as text."""
        return tuple(tuple(map(str, row)) for row in self.rows)

    @property
    def words_with_groups(self) -> list[list[str]]:
        """The same with groups between brackets: `[0SEND_F1` is the first of one, `0RECV_B0]`
        the last.
        """
        first = {str(group[0]) for group in self.groups}
        last = {str(group[-1]) for group in self.groups}
        rows: list[list[str]] = []
        for words in self.words:
            row: list[str] = []
            for word in words:
                row.append(f"{'[' * (word in first)}{word}{']' * (word in last)}")
            rows.append(row)
        return rows

    @cached_property
    def splits(self) -> bool:
        """Whether backward is done in two parts anywhere."""
        weight = Work.WEIGHT
        return any(action.work is weight for action in chain.from_iterable(self.rows))

    @cached_property
    def spans(self) -> tuple[dict[int, range], ...]:
        """For each rank the cells where its stages work (`spans`)."""
        return tuple(map(spans, self.rows))

    @property
    def forwards(self) -> "Schedule":
        """The part for evaluation: forwards and their messages, in the same order.

        If ranks do not wait for each other in the whole, they do not in this part: of the messages
        here that were never matched, take the one that is matched first in the whole.  All that its
        two ranks do here before they post it they do before it there too, so it is done; both post
        it, and it is matched.  The same holds of groups.
        """
        groups = [group for group in map(_forwards_of, self.groups) if len(group) > 1]
        return evolve(self, rows=tuple(map(_forwards_of, self.rows)), groups=tuple(groups))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the model's order."""
        return stages_of_rank(self.stage_to_rank, rank)

    def cells(self) -> Iterator[tuple[int, int, Action]]:
        """Rank, place in the row, action."""
        for rank, row in enumerate(self.rows):
            for place, action in enumerate(row):
                yield rank, place, action


def _forwards_of(actions: Row) -> Row:
    return tuple(action for action in actions if action.work in _FORWARDS)


def spans(row: Row) -> dict[int, range]:
    """For each stage the cells of a row from its first action to the next action that computes
    after its last one.

    So the value that a last action makes is sent before a reduction begins.
    """
    cells: list[tuple[int, int]] = []
    for place, action in enumerate(row):
        if not action.work.is_message:
            cells.append((place, action.stage))
    begins, ends = dict[int, int](), dict[int, int]()
    for (place, stage), (next_place, _) in pairwise([*cells, (len(row), -1)]):
        begins.setdefault(stage, place)
        ends[stage] = next_place
    return {stage: range(begins[stage], end) for stage, end in ends.items()}


def stages_of_rank(stage_to_rank: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages of a rank, in the model's order."""
    return tuple(stage for stage, owner in enumerate(stage_to_rank) if owner == rank)


class ScheduleError(Exception):
    """A schedule cannot do what a plan asks for: the reason, with the arithmetic, and help."""

    def __init__(self, why: str, help: str) -> None:
        super().__init__(why)
        self.why = why
        self.help = help
