"""The actions of a schedule's rows, and which messages begin as one, as the compiler has written both."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


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


def read(row: str) -> list[Action]:
    """The actions of a row."""
    return [*map(_action, row.split(","))]


def _action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    assert match, f"pipeline: `{word}` is no action"
    return Action(int(match[1]), match[2], int(match[3]))


def grouped(actions: Sequence[Action], groups: str) -> Iterator[list[Action]]:
    """A row's actions in their order, those together that begin as one; `groups` is the rank's line."""
    of = {_action(word): group for group in groups.split(",") for word in group.split()}
    return (list(each) for _, each in groupby(actions, lambda action: of.get(action, action)))
