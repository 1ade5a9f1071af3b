"""Rows as text: a line for each rank, cells between commas, as torch.distributed.pipelining
writes and reads them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from .actions import Action, Schedule

_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_STATE = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")
"""Actions of torch that gather weights and reduce gradients; rows here do not say when."""

Cell = tuple[int, int]
"""A rank, and a place in its line."""


class BadRows(Exception):
    """Text that is not rows of a schedule, and the place of the mistake: a rank and a cell of its
    line, from 0.
    """

    def __init__(self, rank: int, cell: int, why: str) -> None:
        super().__init__(f"rank {rank}, cell {cell}: {why}")
        self.rank = rank
        self.cell = cell
        self.why = why


def csv(schedule: Schedule) -> str:
    """The rows as torch's `_PipelineScheduleRuntime._load_csv` reads them."""
    return "".join(f"{','.join(row)}\n" for row in schedule.words)


def groups_csv(schedule: Schedule) -> str:
    """The messages that begin as one: a line for each rank, groups between commas, messages
    between spaces.
    """
    lines: list[list[str]] = [[] for _ in schedule.rows]
    for group in schedule.groups:
        lines[schedule.stage_to_rank[group[0].stage]].append(" ".join(map(str, group)))
    return "".join(f"{','.join(line)}\n" for line in lines)


def parse_csv(text: str) -> Schedule:
    """Rows from text, as `csv` or torch's `_dump_csv` writes them; `BadRows` if it is anything
    else.

    A stage is on the rank whose row has it.  Empty cells, where a rank waits, are left out.
    """
    lines = [line.split(",") for line in text.rstrip().split("\n")]
    rows: list[list[Action]] = [[] for _ in lines]
    stages: dict[int, Cell] = {}
    microbatches: dict[int, Cell] = {}
    for rank, action, cell in _all_actions(lines):
        owner, _ = stages.setdefault(action.stage, cell)
        if owner != rank:
            raise BadRows(*cell, f"`{action}` is for stage {action.stage}, which rank {owner} has")
        microbatches.setdefault(action.microbatch, cell)
        rows[rank].append(action)
    for rank, row in enumerate(rows):
        if not row:
            raise BadRows(rank, 0, "the rank has nothing to do")
    stage_to_rank = tuple(stages[stage][0] for stage in range(_count("stage", stages)))
    return Schedule(stage_to_rank, _count("microbatch", microbatches), tuple(map(tuple, rows)))


def _all_actions(lines: Sequence[Sequence[str]]) -> Iterator[tuple[int, Action, Cell]]:
    """The actions of all lines in order, each with its rank and its cell."""
    for rank, line in enumerate(lines):
        for place, content in enumerate(line):
            for action in _actions(content.strip(), (rank, place)):
                yield rank, action, (rank, place)


def _actions(content: str, cell: Cell) -> Iterator[Action]:
    """The actions of a cell; an overlapped pair `(0F1;1B0)OVERLAP_F_B` gives its two in order."""
    parts = [content]
    if pair := _PAIR.fullmatch(content):
        parts = pair[1].split(";")
    for part in parts:
        if action := Action.parse(part):
            yield action
        elif part and not _STATE.fullmatch(part):
            short = part if len(part) <= 24 else f"{part[:23]}…"
            raise BadRows(*cell, f"`{short}` is not an action such as `3F12`")


def _count(what: str, seen: Mapping[int, Cell]) -> int:
    """How many stages or microbatches there are: all up to the largest."""
    if (largest := max(seen)) >= len(seen):
        missing = min(set(range(len(seen))) - set(seen))
        raise BadRows(*seen[largest], f"there is a {what} {largest}, but no {what} {missing}")
    return len(seen)
