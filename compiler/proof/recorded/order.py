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
    if lines := _lost_message(records):
        return lines
    calls = list[list[tuple[Stretch, Call]]]()
    for record in records:
        # a message waits for nobody
        calls.append([(stretch, call) for stretch, call in record.calls() if call.peer is None])
    next_calls = [0] * len(records)
    due = deque(range(len(records)))
    while due:
        rank = due.popleft()
        group = _meeting(calls, next_calls, rank)
        if not group:
            continue
        if not _alike([calls[peer][next_calls[peer]][1] for peer in group]):
            return (
                f"{ranks(group)} meet with different calls",
                *_waiting(calls, next_calls, group),
            )
        for peer in group:
            next_calls[peer] += 1
        due.extend(group)
    stuck = {rank for rank, index in enumerate(next_calls) if index < len(calls[rank])}
    if not stuck:
        return ()
    awaited = set(stuck)
    for rank in stuck:
        awaited.update(calls[rank][next_calls[rank]][1].group)
    return ("ranks wait for each other for ever", *_waiting(calls, next_calls, sorted(awaited)))


def _lost_message(records: Sequence[Record]) -> tuple[str, ...]:
    """The first message between two ranks that is not received as it is sent."""
    sends = defaultdict[tuple[int, int], list[str]](list)
    receives = defaultdict[tuple[int, int], list[str]](list)
    for record in records:
        for stretch, call in record.calls():
            if call.peer is None:
                continue
            words = f"{stretch}: {call.dtype}{list(call.shape)}"
            if call.op == "send":
                sends[record.rank, call.peer].append(words)
            else:
                receives[call.peer, record.rank].append(words)
    for source, target in sorted({*sends, *receives}):
        pairs = zip_longest(sends[source, target], receives[source, target], fillvalue="nothing")
        for sent, received in pairs:
            if sent != received:
                where = f"rank {target} does not receive what rank {source} sends"
                return where, f"  rank {source}, {sent}", f"  rank {target}, {received}"
    return ()


def _meeting(
    calls: Sequence[Sequence[tuple[Stretch, Call]]], next_calls: Sequence[int], rank: int
) -> tuple[int, ...]:
    """The group of the next call of `rank`, if all of its ranks have come to a call of that
    group; else nothing.
    """
    if next_calls[rank] == len(calls[rank]):
        return ()
    group = calls[rank][next_calls[rank]][1].group
    for peer in group:
        index = next_calls[peer]
        if index == len(calls[peer]) or calls[peer][index][1].group != group:
            return ()
    return group


def _alike(calls: Sequence[Call]) -> bool:
    """Whether the ranks of a group, in its order, make one call; with torch's other ops only the
    root may send.

    Where parts are not equal, each rank has from another one as much as that sends it.
    """
    if any("::" in call.op for call in calls):
        return len({call.op for call in calls}) == 1
    kinds = set[Call]()
    for call in calls:
        if call.splits:
            call = evolve(call, shape=call.shape[1:], splits=None)
        kinds.add(call)
    if len(kinds) > 1:
        return False
    sent, received = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for call in calls:
        if call.splits:
            sizes_sent, sizes_received = call.splits
            sent.append(sizes_sent)
            received.append(sizes_received)
    # a rank receives its column of what all ranks send
    return [*zip(*sent, strict=True)] == received


def _waiting(
    calls: Sequence[Sequence[tuple[Stretch, Call]]],
    next_calls: Sequence[int],
    ranks: Sequence[int],
) -> list[str]:
    """For each rank the call that it has come to; of many ranks the first few."""
    lines: list[str] = []
    for rank in ranks[:_SHOWN]:
        if next_calls[rank] == len(calls[rank]):
            lines.append(f"  rank {rank} has no further call")
            continue
        stretch, call = calls[rank][next_calls[rank]]
        lines.append(f"  rank {rank}, {stretch}: {call}")
    if len(ranks) > _SHOWN:
        lines.append(f"  and {len(ranks) - _SHOWN} more")
    return lines


_SHOWN = 8


Sent = tuple[Expected, Call]
"""A call that exchanges rows, in the plan and in the record."""


def as_planned(recorded: Sequence[Call], plan: Sequence[Call]) -> list[Call]:
    """The recorded calls, without the numbers of rows where the plan's have rows of experts."""
    planned = {*plan}
    calls = list[Call]()
    for index, call in enumerate(recorded):
        rows = evolve(call, shape=(None, *call.shape[1:]), splits=None)
        is_due = rows in plan[index : index + 1]
        if is_due or (rows in planned and call not in planned):
            call = rows
        calls.append(call)
    return calls


def find_lost_rows(plans: Sequence[Calls], records: Sequence[Record]) -> tuple[str, ...]:
    """The first faults in numbers of rows, in records whose calls are otherwise their plan's,
    in one order.
    """
    steps = list[list[Stretch]]()
    for record in records:
        steps.append([stretch for stretch in record.stretches if stretch.phase != "loop"])
    for stretches in zip(*steps, strict=True):
        sent = list[list[Sent]]()
        for plan, stretch in zip(plans, stretches, strict=True):
            sent.append(_exchanges_of_rows(plan[stretch.phase], stretch.calls))
        if mistake := next(chain(_dropped_rows(sent), _astray(sent)), ""):
            return (f"{stretches[0]}: {mistake}",)
    return ()


def _exchanges_of_rows(plan: Sequence[Expected], calls: Sequence[Call]) -> list[Sent]:
    pairs = zip(plan, calls, strict=True)
    return [(planned, call) for planned, call in pairs if planned.rows and call.splits]


def _dropped_rows(sent: Sequence[list[Sent]]) -> Iterator[str]:
    """Exchanges where the ranks of a group together have other rows than tokens and choices."""
    of_groups: dict[tuple[int, ...], list[list[Sent]]] = {}
    for sent_by_rank in sent:
        of_rank: dict[tuple[int, ...], list[Sent]] = {}
        for planned, call in sent_by_rank:
            of_rank.setdefault(call.group, []).append((planned, call))
        for group, exchanges in of_rank.items():
            of_groups.setdefault(group, []).append(exchanges)
    for group, of_ranks in of_groups.items():
        for exchange in zip(*of_ranks, strict=True):
            (planned, _), *_ = exchange
            rows = sum(call.shape[0] or 0 for _, call in exchange)
            choices = sum(line.rows for line, _ in exchange)
            if rows > choices or (rows < choices and not planned.drops):
                yield f"{ranks(group)} send {rows} rows of {choices} choices: {_place(planned)}"


def _astray(sent: Sequence[list[Sent]]) -> Iterator[str]:
    """Exchanges that do not give back what came: forward has one of each kind in turn, backward
    the same ones.
    """
    for rank, sent_by_rank in enumerate(sent):
        forward = [pair for pair in sent_by_rank if pair[0].where == "forward"]
        for (_, there), (planned, back) in zip(forward[::2], forward[1::2], strict=True):
            if there.splits != _reverse_splits(back):
                yield f"rank {rank} sends back other rows than came: {_place(planned)}"
        ways = {call.splits for _, call in forward}
        for planned, call in sent_by_rank:
            if call.splits not in ways:
                place = _place(planned)
                yield f"rank {rank} has other rows in backward than in forward: {place}"


def _reverse_splits(call: Call) -> Splits | None:
    return call.splits and call.splits[::-1]


def _place(planned: Expected) -> str:
    return f"`{planned.value}`, {planned.line}"
