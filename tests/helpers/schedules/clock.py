"""When ranks are done, by the simplest simulation there is: what `generate`'s schedules are
measured with.

Purpose: a reference that shares nothing with `simulate`.  Non-goals: messages, speed.
"""

from collections.abc import Sequence

from attrs import frozen

from scalec.compiler.schedules.actions import Action, Row, Schedule, Work

ParamGroup = Sequence[Action]
"""Actions that begin together, when all of them can, and end together."""


@frozen
class Measured:
    """When ranks begin and end, and how long they compute."""

    begin: tuple[float, ...]
    end: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The time by which the whole step is longer than a rank's work; the same for all ranks
        of these tests.
        """
        (busy,) = set(self.busy)
        return max(self.end) - busy

    @property
    def bubble_of_span(self) -> float:
        """The longest that a rank waits between its own first and last action."""
        return max(
            end - begin - busy
            for begin, end, busy in zip(self.begin, self.end, self.busy, strict=True)
        )


def measured(schedule: Schedule, f: float = 1, i: float = 1, w: float = 1) -> Measured:
    """Each rank's time if all do their rows as soon as they can; fails if they wait for each
    other.
    """
    return measured_groups(
        schedule, [[[action] for action in row] for row in schedule.rows], f, i, w
    )


def measured_groups(
    schedule: Schedule,
    rows: Sequence[Sequence[ParamGroup]],
    f: float = 1,
    i: float = 1,
    w: float = 1,
) -> Measured:
    """The same for rows of groups."""
    takes = {Work.FORWARD: f, Work.INPUT: i, Work.WEIGHT: w, Work.BACKWARD: i + w}
    ends: dict[tuple[int, Work, int], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for row, span in zip(rows, spans, strict=True):
            while len(span) < len(row):
                group = row[len(span)]
                needs = [need for action in group for need in _needs(action, schedule.stages)]
                if any(need not in ends for need in needs):
                    break
                begin = max(
                    [ends[need] for need in needs] + [end for _, end in span[-1:]], default=0
                )
                end = begin + sum(takes[action.work] for action in group)
                ends.update(
                    {(action.stage, _part(action), action.microbatch): end for action in group}
                )
                span.append((begin, end))
                moved = True
    assert [len(span) for span in spans] == [len(row) for row in rows], "ranks wait for each other"
    return Measured(
        tuple(span[0][0] for span in spans),
        tuple(span[-1][1] for span in spans),
        tuple(sum(takes[action.work] for group in row for action in group) for row in rows),
    )


def held(row: Row) -> int:
    """How many forwards are waiting for B or W, when most."""
    now = [0]
    for action in row:
        now.append(now[-1] + {Work.FORWARD: 1, Work.INPUT: 0}.get(action.work, -1))
    return max(now)


def _part(action: Action) -> Work:
    return Work.INPUT if action.work is Work.BACKWARD else action.work


def _needs(action: Action, stages: int) -> list[tuple[int, Work, int]]:
    stage, microbatch = action.stage, action.microbatch
    match action.work:
        case Work.FORWARD:
            return [(stage - 1, Work.FORWARD, microbatch)] if stage else []
        case Work.WEIGHT:
            return [(stage, Work.INPUT, microbatch)]
        case _:
            after = [(stage + 1, Work.INPUT, microbatch)] if stage + 1 < stages else []
            return [(stage, Work.FORWARD, microbatch), *after]
