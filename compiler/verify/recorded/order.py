"""Whether the ranks' calls can be carried out: every rank of a group has to come to the same call, at its turn.

Ranks that take two groups in different order wait for each other for ever, though each group's own calls agree (row 34
of the catalogue of silent failures); so the calls of all ranks are played, not compared group by group.

Non-goals: the plan.
"""

from collections import deque
from collections.abc import Sequence

from .files import Call, Record, Stretch, ranks


def disorder(records: Sequence[Record]) -> tuple[str, ...]:
    """What keeps the ranks from meeting, in lines; none where all calls of all ranks can be carried out."""
    calls = [list(record.calls()) for record in records]
    at = [0] * len(records)  # each rank's next call
    due = deque(range(len(records)))
    while due:
        rank = due.popleft()
        group = _meeting(calls, at, rank)
        if not group:
            continue
        if len({_essence(calls[peer][at[peer]][1]) for peer in group}) > 1:
            return (f"{ranks(group)} meet with different calls", *_waiting(calls, at, group))
        for peer in group:
            at[peer] += 1
        due.extend(group)
    stuck = [rank for rank, done in enumerate(at) if done < len(calls[rank])]
    if not stuck:
        return ()
    ended = [peer for rank in stuck for peer in calls[rank][at[rank]][1].group if peer not in stuck]
    return ("ranks wait for each other for ever", *_waiting(calls, at, sorted({*stuck, *ended})))


def _meeting(calls: Sequence[Sequence[tuple[Stretch, Call]]], at: Sequence[int], rank: int) -> tuple[int, ...]:
    """The group of the next call of `rank`, if all of its ranks have come to a call of that group; else nothing."""
    if at[rank] == len(calls[rank]):
        return ()
    group = calls[rank][at[rank]][1].group
    there = (at[peer] < len(calls[peer]) and calls[peer][at[peer]][1].group == group for peer in group)
    return group if all(there) else ()


def _essence(call: Call) -> Call | str:
    """What has to be equal on all ranks; with torch's other ops (saving uses some) only the root may send."""
    return call.op if "::" in call.op else call


def _waiting(calls: Sequence[Sequence[tuple[Stretch, Call]]], at: Sequence[int], ranks: Sequence[int]) -> list[str]:
    """For each rank the call that it has come to; of many ranks the first few."""
    lines: list[str] = []
    for rank in ranks[:_SHOWN]:
        if at[rank] == len(calls[rank]):
            lines.append(f"  rank {rank} has no further call")
            continue
        stretch, call = calls[rank][at[rank]]
        lines.append(f"  rank {rank}, {stretch}: {call}")
    return [*lines, *[f"  and {len(ranks) - _SHOWN} more"] * (len(ranks) > _SHOWN)]


_SHOWN = 8
