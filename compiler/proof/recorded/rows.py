"""Rows of experts in a record: how many a rank sends depends on its data, but not how these numbers belong together.

That a rank receives what others send it is part of the order (`order`).
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from attrs import evolve

from .files import Call, Record, Splits, ranks
from .plan import Calls, Expected

Sent = tuple[Expected, Call]
"""A call that exchanges rows, in the plan and in the record."""


def as_planned(recorded: Sequence[Call], plan: Sequence[Call]) -> list[Call]:
    """The recorded calls, without the numbers of rows where the plan's have rows of experts."""
    planned = {*plan}

    def seen(at: int, call: Call) -> Call:
        rows = evolve(call, shape=(None, *call.shape[1:]), splits=None)
        return rows if rows in plan[at : at + 1] or (rows in planned and call not in planned) else call

    return [seen(at, call) for at, call in enumerate(recorded)]


def lost(plans: Sequence[Calls], records: Sequence[Record]) -> tuple[str, ...]:
    """The first faults in numbers of rows, in records whose calls are otherwise their plan's, in one order."""
    steps = ([stretch for stretch in record.stretches if stretch.phase != "loop"] for record in records)
    for stretches in zip(*steps, strict=True):
        sent = [_sent(plan[own.phase], own.calls) for plan, own in zip(plans, stretches, strict=True)]
        if mistake := next(chain(_dropped(sent), _astray(sent)), ""):
            return (f"{stretches[0]}: {mistake}",)
    return ()


def _sent(plan: Sequence[Expected], calls: Sequence[Call]) -> list[Sent]:
    return [(each, call) for each, call in zip(plan, calls, strict=True) if each.rows and call.splits]


def _dropped(sent: Sequence[list[Sent]]) -> Iterator[str]:
    """Exchanges in which the ranks of a group together have other rows than tokens and choices."""
    of_groups: dict[tuple[int, ...], list[list[Sent]]] = {}
    for own in sent:
        for group in dict.fromkeys(call.group for _, call in own):
            of_groups.setdefault(group, []).append([each for each in own if each[1].group == group])
    for group, of_ranks in of_groups.items():
        for exchange in zip(*of_ranks, strict=True):
            (each, _), *_ = exchange
            rows, choices = sum(call.shape[0] or 0 for _, call in exchange), sum(each.rows for each, _ in exchange)
            if rows > choices or (rows < choices and not each.drops):
                yield f"{ranks(group)} send {rows} rows of {choices} choices: {_place(each)}"


def _astray(sent: Sequence[list[Sent]]) -> Iterator[str]:
    """Exchanges that do not give back what came: forward has one of each kind in turn, backward the same ones."""
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
