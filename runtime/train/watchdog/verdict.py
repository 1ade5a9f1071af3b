"""Finds the rank that the others wait for, by the positions of all ranks that answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

MESSAGES = " messages"
"""The end of the name of a group in which stages send to each other: its ranks do not all make
the same calls.
"""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is.

    doing    what the rank does as a whole, as in `step 3`
    counts   how many calls it has made in each of its groups, by the group's name
    waits    the group that it waits in; "" if that is unknown
    peers    the ranks whose message it waits for
    waiting  whether it waits for others at all
    call     the plan's call that it waits in, in words
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
    """The ranks that the others wait for, and why, in words; if there are none, why nobody is to
    blame.

    `silent` are ranks that have not answered.
    """

    missing: tuple[int, ...]
    text: str
    silent: tuple[int, ...] = ()


def judge(
    mesh: Mapping[str, int], positions: Sequence[Position], hosts: Mapping[int, str]
) -> Verdict:
    """The verdict.  `hosts` has the hosts of all ranks that have begun."""
    position_of = {position.rank: position for position in positions}
    silent = tuple(rank for rank in range(prod(mesh.values())) if rank not in position_of)
    for find_culprits in (_find_failed, _find_astray, _find_silent, _find_elsewhere, _find_behind):
        reasons = dict(find_culprits(mesh, position_of))
        if not reasons:
            continue
        words = list[str]()
        for rank, reason in [*reasons.items()][:_SHOWN]:
            words.append(f"{_describe_rank(rank, hosts)} {reason}")
        if len(reasons) > _SHOWN:
            words.append(f"and {len(reasons) - _SHOWN} more")
        return Verdict(tuple(reasons), "; ".join(words), silent)
    return Verdict(
        (),
        "all ranks wait, and none is missing: look at the links, the network and the devices"
        " between them",
    )


_SHOWN = 8
_Whys = Iterator[tuple[int, str]]


def _find_failed(mesh: Mapping[str, int], position_of: Mapping[int, Position]) -> _Whys:
    """Ranks that say that they fail."""
    for rank, position in position_of.items():
        if position.failed:
            yield rank, f"failed: {position.failed}"


def _find_silent(mesh: Mapping[str, int], position_of: Mapping[int, Position]) -> _Whys:
    """Ranks that do not answer."""
    reasons = dict[int, str]()
    for position in position_of.values():
        reasons |= dict(position.silent)
    unknown = "does not answer: its process is stopped or gone, or its machine is"
    for rank in range(prod(mesh.values())):
        if rank not in position_of:
            yield rank, reasons.get(rank, unknown)


def _find_astray(mesh: Mapping[str, int], position_of: Mapping[int, Position]) -> _Whys:
    """Ranks that have made calls in another order than the plan's.

    None if all have: then the plan is another program's.
    """
    if all(position.astray for position in position_of.values()):
        return
    for rank, position in position_of.items():
        if position.astray:
            yield (
                rank,
                f"has left the plan's order in {position.doing}: {position.astray}; it is at"
                f" {position.code}",
            )


def _find_elsewhere(mesh: Mapping[str, int], position_of: Mapping[int, Position]) -> _Whys:
    """Ranks that wait for nobody, where others wait."""
    if not any(position.waiting for position in position_of.values()):
        return
    for rank, position in position_of.items():
        if not position.waiting:
            yield rank, f"did not come: in {position.doing} it is at {position.code}"


def _find_behind(mesh: Mapping[str, int], position_of: Mapping[int, Position]) -> _Whys:
    """Ranks that others wait for, and that wait for none; if they wait in a circle, its ranks."""
    waits = _waits(mesh, position_of)
    wanted = set[int]()
    for ranks in waits.values():
        wanted.update(ranks)
    last = {rank for rank in wanted if not waits[rank]}
    for rank in sorted(last or _circle(waits)):
        position = position_of[rank]
        place = position.call or position.code
        yield rank, f"is behind: in {position.doing} it is at {place}"


def _waits(mesh: Mapping[str, int], position_of: Mapping[int, Position]) -> dict[int, list[int]]:
    """For each rank some ranks that it waits for: its peers, and in each of its groups one that
    has made the fewest calls, if it has made fewer.
    """
    counts_of_groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rank, position in position_of.items():
        for group, count in position.counts.items():
            if not group.endswith(MESSAGES):
                key = group, _first(mesh, group, rank)
                counts_of_groups.setdefault(key, []).append((count, rank))
    waits = {rank: [*position.peers] for rank, position in position_of.items()}
    for (group, _), counts in counts_of_groups.items():
        least, last = min(counts)
        for count, rank in counts:
            if count > least and position_of[rank].waits in ("", group):
                waits[rank].append(last)
    return waits


def find_awaited_ranks(mesh: Mapping[str, int], one: Position) -> tuple[int, ...]:
    """The ranks that a rank waits for, as far as it knows by itself: the ranks of its groups."""
    others = {*one.peers}
    for group in one.counts:
        if one.waits in ("", group) and not group.endswith(MESSAGES):
            others.update(members(mesh, group, one.rank))
    return tuple(sorted(others - {one.rank}))


def _circle(waits: Mapping[int, Sequence[int]]) -> set[int]:
    """The ranks of a circle of waits; none if there is none."""
    for rank in waits:
        path: list[int] = []
        while waits.get(rank) and rank not in path:
            path.append(rank)
            rank = waits[rank][0]
        if rank in path:
            return {*path[path.index(rank) :]}
    return set()


def members(mesh: Mapping[str, int], group: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group of this name that `rank` is in, as `Mesh.groups` names it."""
    axes, sizes = _axes(group), (*mesh.values(),)
    index = list[Any]()
    for name, place in zip(mesh, np.unravel_index(rank, sizes), strict=True):
        index.append(slice(None) if name in axes else place)
    ranks: list[int] = np.arange(prod(sizes)).reshape(sizes)[*index].ravel().tolist()
    among = group.removesuffix(MESSAGES).partition("[")[2]
    if not among:
        return tuple(ranks)
    places = among[:-1].split(",")
    return tuple(ranks[int(place)] for place in places)


def _first(mesh: Mapping[str, int], group: str, rank: int) -> int:
    """The first rank of the group of this name that `rank` is in, along the group's axes."""
    axes = _axes(group)
    first, inside = 0, prod(mesh.values())
    for name, size in mesh.items():
        inside //= size
        if name not in axes:
            first += rank // inside % size * inside
    return first


def _axes(group: str) -> list[str]:
    return group.removesuffix(MESSAGES).partition("[")[0].split("*")


def _describe_rank(rank: int, hosts: Mapping[int, str]) -> str:
    if rank not in hosts:
        return f"rank {rank}"
    return f"rank {rank} on {hosts[rank]}"


def describe_ranks(ranks: Sequence[int]) -> str:
    """For instance `rank 3`, or `ranks 0, 1 and 4 more`."""
    words = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}"
    if len(ranks) > _SHOWN:
        words += f" and {len(ranks) - _SHOWN} more"
    return words


def read_positions(lines: str) -> list[Position]:
    """Positions from their text, a line of JSON for each."""
    positions = list[Position]()
    for line in lines.splitlines():
        fields: dict[str, Any] = json.loads(line)
        positions.append(Position(**fields))
    return positions
