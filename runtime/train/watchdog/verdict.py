"""Which rank the others wait for, from the positions of all that answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

MESSAGES = " messages"
"""The end of the names of groups in which stages send to each other: their ranks do not all
make the same calls.
"""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is.

    doing    `step 3`, or another thing that a rank does as a whole
    counts   how many calls it has made in each of its groups, by the group's name
    waits    the group in which it waits, "" if that is not known
    peers    the ranks whose message it waits for
    waiting  whether it waits for others at all
    call     the plan's call in which it waits, in words
    code     where its program is, in words
    astray   how it has left the plan's order of calls, if it has
    failed   why it fails, if it does
    silent   ranks of its machine that will not answer, and why
    """

    rank: int
    host: str
    doing: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    waits: str = ""
    peers: Sequence[int] = ()
    waiting: bool = False
    call: str = ""
    code: str = ""
    astray: str = ""
    failed: str = ""
    silent: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class Verdict:
    """The ranks that the others wait for, and why, in words; without any, why nobody is to blame.

    `silent` are ranks that have not answered.
    """

    missing: tuple[int, ...]
    text: str
    silent: tuple[int, ...] = ()


def judge(
    mesh: Mapping[str, int], positions: Sequence[Position], hosts: Mapping[int, str]
) -> Verdict:
    """The verdict.  `hosts` has those of all ranks that have begun."""
    found = {each.rank: each for each in positions}
    silent = tuple(rank for rank in range(prod(mesh.values())) if rank not in found)
    for culprits in (_failed, _astray, _ended, _elsewhere, _behind):
        if why := dict(culprits(mesh, found)):
            text = "; ".join(
                f"{_named(rank, hosts)} {reason}" for rank, reason in [*why.items()][:_SHOWN]
            )
            more = f"; and {len(why) - _SHOWN} more" if len(why) > _SHOWN else ""
            return Verdict(tuple(why), text + more, silent)
    return Verdict(
        (),
        "all ranks wait, and none is missing: look at the links, the network and the devices"
        " between them",
    )


_SHOWN = 8
_Whys = Iterator[tuple[int, str]]


def _failed(mesh: Mapping[str, int], found: Mapping[int, Position]) -> _Whys:
    """Ranks that say so."""
    return ((rank, f"failed: {each.failed}") for rank, each in found.items() if each.failed)


def _ended(mesh: Mapping[str, int], found: Mapping[int, Position]) -> _Whys:
    """Ranks that do not answer."""
    known = {rank: why for each in found.values() for rank, why in each.silent}
    for rank in range(prod(mesh.values())):
        if rank not in found:
            yield (
                rank,
                known.get(
                    rank, "does not answer: its process is stopped or gone, or its machine is"
                ),
            )


def _astray(mesh: Mapping[str, int], found: Mapping[int, Position]) -> _Whys:
    """Ranks that have made calls in another order than the plan's; if all have, that is of
    another program.
    """
    for rank, each in found.items():
        if each.astray and not all(other.astray for other in found.values()):
            yield (
                rank,
                f"has left the plan's order in {each.doing}: {each.astray}; it is at {each.code}",
            )


def _elsewhere(mesh: Mapping[str, int], found: Mapping[int, Position]) -> _Whys:
    """Ranks that wait for nobody, where others wait."""
    if any(each.waiting for each in found.values()):
        for rank, each in found.items():
            if not each.waiting:
                yield rank, f"did not come: in {each.doing} it is at {each.code}"


def _behind(mesh: Mapping[str, int], found: Mapping[int, Position]) -> _Whys:
    """Ranks that others wait for, and that wait for none; if they wait in a circle, those of it."""
    waits = _waits(mesh, found)
    wanted = {rank for own in waits.values() for rank in own}
    for rank in sorted({rank for rank in wanted if not waits[rank]} or _circle(waits)):
        each = found[rank]
        yield rank, f"is behind: in {each.doing} it is at {each.call or each.code}"


def _waits(mesh: Mapping[str, int], found: Mapping[int, Position]) -> dict[int, list[int]]:
    """For each rank some that it waits for: of each of its groups one that has made the fewest
    calls, if fewer.
    """
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rank, each in found.items():
        for group, count in each.counts.items():
            if not group.endswith(MESSAGES):
                groups.setdefault((group, _first(mesh, group, rank)), []).append((count, rank))
    waits = {rank: [*each.peers] for rank, each in found.items()}
    for (group, _), counts in groups.items():
        least, last = min(counts)
        for count, rank in counts:
            if count > least and found[rank].waits in ("", group):
                waits[rank].append(last)
    return waits


def awaited(mesh: Mapping[str, int], one: Position) -> tuple[int, ...]:
    """The ranks that a rank waits for, as far as it knows by itself: those of its groups."""
    groups = [
        group for group in one.counts if one.waits in ("", group) and not group.endswith(MESSAGES)
    ]
    others = {*one.peers, *(rank for group in groups for rank in members(mesh, group, one.rank))}
    return tuple(sorted(others - {one.rank}))


def _circle(waits: Mapping[int, Sequence[int]]) -> set[int]:
    """The ranks of a circle of waits; none if there is none."""
    for rank in waits:
        seen: list[int] = []
        while waits.get(rank) and rank not in seen:
            seen.append(rank)
            rank = waits[rank][0]
        if rank in seen:
            return {*seen[seen.index(rank) :]}
    return set()


def members(mesh: Mapping[str, int], group: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group of this name that `rank` is in, as `Mesh.groups` names it."""
    axes, sizes = _axes(group), (*mesh.values(),)
    among = group.removesuffix(MESSAGES).partition("[")[2]
    places = zip(mesh, np.unravel_index(rank, sizes), strict=True)
    own = np.arange(prod(sizes)).reshape(sizes)[
        *(slice(None) if name in axes else at for name, at in places)
    ]
    ranks: list[int] = own.ravel().tolist()
    return tuple(ranks[int(place)] for place in among[:-1].split(",")) if among else tuple(ranks)


def _first(mesh: Mapping[str, int], group: str, rank: int) -> int:
    """The rank at the beginning of the axes of a group that `rank` is in."""
    axes = _axes(group)
    first, inside = 0, prod(mesh.values())
    for name, size in mesh.items():
        inside //= size
        first += 0 if name in axes else rank // inside % size * inside
    return first


def _axes(group: str) -> list[str]:
    return group.removesuffix(MESSAGES).partition("[")[0].split("*")


def _named(rank: int, hosts: Mapping[int, str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"


def named(ranks: Sequence[int]) -> str:
    """For instance `rank 3`, or `ranks 0, 1 and 4 more`."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def read(lines: str) -> list[Position]:
    """Positions as they were written, a line of JSON each."""
    found: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines()]
    return [Position(**each) for each in found]
