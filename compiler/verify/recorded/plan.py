"""What each rank has to communicate, written out from plan.json call for call.

Non-goals: the IR.  Reading the account alone, and working out groups from the mesh anew, this shares nothing with what
wrote the program.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Any

from attrs import frozen

from .files import Call


@frozen
class Expected:
    """A call of the plan: the value it makes, and the plan's line that asks for it."""

    call: Call
    where: str  # forward, backward or step
    value: str
    line: str

    def __str__(self) -> str:
        """The call, and where it comes from."""
        around = f" in {self.where}" if self.where != "step" else ""
        return f"{self.call}{around}: `{self.value}`, {self.line}"


def expected(plan: dict[str, Any], rank: int) -> dict[str, tuple[Expected, ...]]:
    """The calls of `rank` in each `train` step and each `evaluate`, in order; a group of one rank does not call."""
    phases = (("train", "collectives"), ("evaluate", "evaluation"))
    return {phase: tuple(_calls(plan, plan[key], rank)) for phase, key in phases}


def _calls(plan: dict[str, Any], listed: Sequence[dict[str, Any]], rank: int) -> Iterator[Expected]:
    calls = [_call(each, peers(plan["mesh"], each["axes"], rank)) for each in listed]
    loops = [(i, tuple(each["loops"])) for i, each in enumerate(listed) if each["ranks"] > 1]
    for i, turn in _unrolled(loops, plan["dims"], ()):
        if not turn or _is_one_of(listed[i]["every"], *turn[-1]):
            yield from [calls[i]] * _begin(listed[i]["last"], listed[i]["ahead"], turn)


def _call(each: dict[str, Any], group: tuple[int, ...]) -> Expected:
    reduces = each["op"] in ("all_reduce", "reduce_scatter")
    reduction = ("max" if each["maximum"] else "sum") if reduces else ""
    call = Call(each["op"], reduction, group, tuple(each["shape"]), each["dtype"])
    return Expected(call, each["where"], each["value"], each["line"])


Turn = tuple[tuple[int, int], ...]
"""Where loops are, outermost first: the turn, counted from 0, and how many there are."""


def _unrolled(
    listed: Sequence[tuple[int, tuple[str, ...]]], sizes: dict[str, int], turn: Turn
) -> Iterator[tuple[int, Turn]]:
    """The numbers of `listed`, each as often as the loops around it turn, neighbours in one loop turning together."""
    for loop, inside in groupby(listed, key=lambda it: it[1][:1]):
        if not loop:
            yield from ((i, turn) for i, _ in inside)
            continue
        body, size = [(i, loops[1:]) for i, loops in inside], sizes[loop[0].partition(".")[0]]
        for index in range(size):
            yield from _unrolled(body, sizes, (*turn, (index, size)))


def _is_one_of(every: int, index: int, turns: int) -> bool:
    """Whether a turn of backward's loops, which run from forward's last turn to its first, is the first of `every`."""
    return (turns - 1 - index) % every == 0


def _begin(last: bool, ahead: int, turn: Turn) -> int:
    """How many calls of a collective begin in a turn.

    What begins in the `last` microbatch, the outermost loop's turn, does so in no other.  Of what begins `ahead` turns
    before its own, so many more begin in the first turn of the loops inside of that, and one in each after it.
    """
    if last and turn[0][0] < turn[0][1] - 1:
        return 0
    at, turns = 0, 1
    for index, size in turn[1:]:
        at, turns = at * size + index, turns * size
    return int(at + ahead < turns) if at else min(1 + ahead, turns)


def peers(mesh: dict[str, int], axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` on `axes` only; ranks count the mesh's places, its last axis innermost."""
    group, inside = [0], prod(mesh.values())
    for name, size in mesh.items():
        inside //= size
        places = range(size) if name in axes else [rank // inside % size]
        group = [outer * size + place for outer in group for place in places]
    return tuple(group)
