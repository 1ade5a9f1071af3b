"""The actions of a schedule's rows, and which of their messages two ranks begin as one.

NCCL has one kernel for messages that begin as one, which is done when all of them are, and does not promise that they
go on by themselves.  So a group is the same at both its ends: messages between the same two ranks that are neighbours
in both rows.  Nothing lies between them on either rank, so that rows which are parts of one order of single messages
are parts of one order of groups.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")

Move = tuple[str, int, int]
"""A message: F or B, the stage that it leaves, the microbatch."""
Pair = frozenset[Move]


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a row, or where a stage begins or ends."""

    stage: int
    work: str
    microbatch: int

    @property
    def is_message(self) -> bool:
        return "_" in self.work

    @property
    def is_forward(self) -> bool:
        """Whether evaluation does it too."""
        return self.work in ("F", "SEND_F", "RECV_F")

    @property
    def move(self) -> Move:
        """The message of which this is an end."""
        way = self.work[-1]
        received = self.work.startswith("RECV")
        return way, self.stage - received if way == "F" else self.stage + received, self.microbatch


def read(row: str) -> list[Action]:
    """The actions of a row."""
    actions: list[Action] = []
    for word in row.split(","):
        match = _ACTION.fullmatch(word)
        assert match, f"pipeline: `{word}` is no action"
        actions.append(Action(int(match[1]), match[2], int(match[3])))
    return actions


def joined(rows: Sequence[Sequence[Action]], stage_to_rank: Sequence[int]) -> Collection[Pair]:
    """The messages that begin with each other, two by two: those that are neighbours at both ends."""

    def ranks(action: Action) -> frozenset[int]:
        way, stage, _ = action.move
        return frozenset((stage_to_rank[stage], stage_to_rank[stage + (1 if way == "F" else -1)]))

    beside = Counter(
        frozenset((one.move, other.move))
        for row in rows
        for one, other in pairwise(row)
        if one.is_message and other.is_message and ranks(one) == ranks(other)
    )
    return {pair for pair, ends in beside.items() if ends == 2}


def grouped(actions: Sequence[Action], joined: Collection[Pair]) -> Iterator[list[Action]]:
    """A row's actions in their order, messages that begin as one together."""
    group: list[Action] = []
    for action in actions:
        are_messages = group and group[-1].is_message and action.is_message
        if group and not (are_messages and frozenset((group[-1].move, action.move)) in joined):
            yield group
            group = []
        group.append(action)
    if group:
        yield group
