"""Whether the ranks' calls can be carried out: every rank of a group has to come to the same call,
at its layer.

Ranks that take two groups in different order wait for each other for ever, though each group's own
calls agree (row 34 of the catalogue of silent failures); so the calls of all ranks are played, not
compared group by group.  A message waits for nobody where it begins: of two ranks, what one sends
is what the other receives, in one order.

Rows of experts too: how many a rank sends depends on its data, but not how these numbers belong
together.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from attrs import evolve

from .files import Call, Record, Splits, Stretch, ranks
from .plan import Calls, Expected


def disorder(records: Sequence[Record]) -> tuple[str, ...]:
    """Why ranks do not meet, in lines; none where all calls of all ranks can be carried out."""
    if lines := _lost(records):
        return lines
    calls = [[it for it in record.calls() if it[1].peer is None] for record in records]
    at = [0] * len(records)  # each rank's next call
    due = deque(range(len(records)))
    while due:
        rank = due.popleft()
        group = _meeting(calls, at, rank)
        if not group:
            continue
        if not _alike([calls[peer][at[peer]][1] for peer in group]):
            return (f"{ranks(group)} meet with different calls", *_waiting(calls, at, group))
        for peer in group:
            at[peer] += 1
        due.extend(group)
    stuck = [rank for rank, done in enumerate(at) if done < len(calls[rank])]
    if not stuck:
        return ()
    ended = [peer for rank in stuck for peer in calls[rank][at[rank]][1].group if peer not in stuck]
    return ("ranks wait for each other for ever", *_waiting(calls, at, sorted({*stuck, *ended})))


def _lost(records: Sequence[Record]) -> tuple[str, ...]:
    """The first message between two ranks that is not received as it is sent."""
    messages = defaultdict[tuple[int, int], tuple[list[str], list[str]]](lambda: ([], []))
    for record in records:
        for stretch, call in record.calls():
            if call.peer is not None:
                sends = call.op == "send"
                pair = (record.rank, call.peer) if sends else (call.peer, record.rank)
                (messages[pair][0] if sends else messages[pair][1]).append(
                    f"{stretch}: {call.dtype}{list(call.shape)}"
                )
    for (source, target), (sent, received) in sorted(messages.items()):
        for one, other in zip_longest(sent, received, fillvalue="nothing"):
            if one != other:
                where = f"rank {target} does not receive what rank {source} sends"
                return where, f"  rank {source}, {one}", f"  rank {target}, {other}"
    return ()


def _meeting(
    calls: Sequence[Sequence[tuple[Stretch, Call]]], at: Sequence[int], rank: int
) -> tuple[int, ...]:
    """The group of the next call of `rank`, if all of its ranks have come to a call of that
    group; else nothing.
    """
    if at[rank] == len(calls[rank]):
        return ()
    group = calls[rank][at[rank]][1].group
    there = (
        at[peer] < len(calls[peer]) and calls[peer][at[peer]][1].group == group for peer in group
    )
    return group if all(there) else ()


def _alike(calls: Sequence[Call]) -> bool:
    """Whether the ranks of a group, in its order, make one call; with torch's other ops only the
    root may send.

    Where parts are not equal, each rank has from another one as much as that sends it.
    """
    if any("::" in call.op for call in calls):
        return len({call.op for call in calls}) == 1
    if (
        len(
            {
                evolve(call, shape=call.shape[1:], splits=None) if call.splits else call
                for call in calls
            }
        )
        > 1
    ):
        return False
    splits = [call.splits for call in calls if call.splits]
    return not splits or [*zip(*(to for to, _ in splits), strict=True)] == [
        received for _, received in splits
    ]


def _waiting(
    calls: Sequence[Sequence[tuple[Stretch, Call]]], at: Sequence[int], ranks: Sequence[int]
) -> list[str]:
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


Sent = tuple[Expected, Call]
"""A call that exchanges rows, in the plan and in the record."""


def as_planned(recorded: Sequence[Call], plan: Sequence[Call]) -> list[Call]:
    """The recorded calls, without the numbers of rows where the plan's have rows of experts."""
    planned = {*plan}

    def seen(at: int, call: Call) -> Call:
        rows = evolve(call, shape=(None, *call.shape[1:]), splits=None)
        return (
            rows if rows in plan[at : at + 1] or (rows in planned and call not in planned) else call
        )

    return [seen(at, call) for at, call in enumerate(recorded)]


def lost(plans: Sequence[Calls], records: Sequence[Record]) -> tuple[str, ...]:
    """The first faults in numbers of rows, in records whose calls are otherwise their plan's,
    in one order.
    """
    steps = (
        [stretch for stretch in record.stretches if stretch.phase != "loop"] for record in records
    )
    for stretches in zip(*steps, strict=True):
        sent = [
            _sent(plan[own.phase], own.calls) for plan, own in zip(plans, stretches, strict=True)
        ]
        if mistake := next(chain(_dropped(sent), _astray(sent)), ""):
            return (f"{stretches[0]}: {mistake}",)
    return ()


def _sent(plan: Sequence[Expected], calls: Sequence[Call]) -> list[Sent]:
    return [
        (each, call) for each, call in zip(plan, calls, strict=True) if each.rows and call.splits
    ]


def _dropped(sent: Sequence[list[Sent]]) -> Iterator[str]:
    """Exchanges in which the ranks of a group together have other rows than tokens and choices."""
    of_groups: dict[tuple[int, ...], list[list[Sent]]] = {}
    for own in sent:
        for group in dict.fromkeys(call.group for _, call in own):
            of_groups.setdefault(group, []).append([each for each in own if each[1].group == group])
    for group, of_ranks in of_groups.items():
        for exchange in zip(*of_ranks, strict=True):
            (each, _), *_ = exchange
            rows, choices = (
                sum(call.shape[0] or 0 for _, call in exchange),
                sum(each.rows for each, _ in exchange),
            )
            if rows > choices or (rows < choices and not each.drops):
                yield f"{ranks(group)} send {rows} rows of {choices} choices: {_place(each)}"


def _astray(sent: Sequence[list[Sent]]) -> Iterator[str]:
    """Exchanges that do not give back what came: forward has one of each kind in turn, backward
    the same ones.
    """
    for rank, own in enumerate(sent):
        forward = [each for each in own if each[0].where == "forward"]
        for (_, there), (each, back) in zip(forward[::2], forward[1::2], strict=True):
            if there.splits != _turned(back):
                yield f"rank {rank} sends back other rows than came: {_place(each)}"
        ways = {call.splits for _, call in forward}
        for each, call in own:
            if call.splits not in ways:
                yield f"rank {rank} has other rows in backward than in forward: {_place(each)}"


def _turned(call: Call) -> Splits | None:
    return call.splits and call.splits[::-1]


def _place(each: Expected) -> str:
    return f"`{each.value}`, {each.line}"
