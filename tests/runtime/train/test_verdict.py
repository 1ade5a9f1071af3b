"""The rank that others wait for is found from where all of them are, for whole meshes and
orders of calls.
"""

import json
from collections import Counter
from dataclasses import asdict, replace
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from scalec.runtime.train.watchdog.verdict import (
    Position,
    find_awaited_ranks,
    judge,
    members,
    read_positions,
)

MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(
    lambda sizes: dict(zip("abc", sizes, strict=False))
)


Hung = tuple[dict[str, int], int, dict[int, Position]]


@st.composite
def _hung(draw: st.DrawFn) -> Hung:
    """A mesh whose ranks make one order of calls until one of them, the second result, makes no
    more; all others wait.

    The last call is of all ranks.
    """
    mesh = draw(MESHES.filter(lambda mesh: prod(mesh.values()) > 1))
    wide = [name for name, size in mesh.items() if size > 1]
    order = [*draw(st.lists(st.sampled_from(wide), max_size=12)), "*".join(wide)]
    culprit, last = (
        draw(st.integers(0, prod(mesh.values()) - 1)),
        draw(st.integers(0, len(order) - 1)),
    )
    begun = dict.fromkeys(range(prod(mesh.values())), 0)
    while moved := [
        rank
        for rank in begun
        if (rank, begun[rank]) != (culprit, last) and _done(mesh, order, begun, rank)
    ]:
        for rank in moved:
            begun[rank] += 1
    counts = {rank: dict.fromkeys(order, 0) | Counter(order[:at]) for rank, at in begun.items()}
    return (
        mesh,
        culprit,
        {
            rank: Position(
                rank,
                "host",
                "step 1",
                counts[rank],
                order[at - 1] if at else "",
                waiting=rank != culprit,
                code="there",
            )
            for rank, at in begun.items()
        },
    )


def _done(mesh: dict[str, int], order: list[str], begun: dict[int, int], rank: int) -> bool:
    """Whether a rank's last call has ended, and there is another one: all ranks of its group
    have come.
    """
    at = begun[rank]
    return at < len(order) and (
        at == 0 or all(begun[peer] >= at for peer in members(mesh, order[at - 1], rank))
    )


@given(_hung())
def test_a_rank_that_does_not_come_is_found(hung: Hung) -> None:
    mesh, culprit, found = hung
    verdict = judge(mesh, [*found.values()], {culprit: "h"})
    assert verdict.missing == (culprit,)
    assert verdict.text == f"rank {culprit} on h did not come: in step 1 it is at there"


@given(_hung())
def test_a_rank_that_does_not_answer_is_found(hung: Hung) -> None:
    mesh, culprit, found = hung
    verdict = judge(mesh, [each for rank, each in found.items() if rank != culprit], {})
    assert verdict.missing == (culprit,)
    assert "does not answer" in verdict.text


@given(_hung())
def test_a_rank_that_only_seems_to_wait_is_behind_all_others(hung: Hung) -> None:
    """As one whose call has ended, but not what it waits for after it."""
    mesh, culprit, found = hung
    seeming = found | {culprit: replace(found[culprit], waiting=True, waits="")}
    assert judge(mesh, [*seeming.values()], {}).missing == (culprit,)


@given(_hung())
def test_who_waits_says_for_whom(hung: Hung) -> None:
    """For the rank that is missing, if that is in its group, as it is known without the others'
    positions.
    """
    mesh, culprit, found = hung
    for rank, each in found.items():
        if each.waiting and each.waits:
            assert (culprit in find_awaited_ranks(mesh, each)) == (
                culprit in members(mesh, each.waits, rank)
            )


def test_ranks_that_wait_in_a_circle_are_all_named() -> None:
    mesh = {"a": 2, "b": 2}
    positions = [
        Position(0, "h", "step 1", {"a": 1, "b": 0}, "a", waiting=True, call="x"),
        Position(2, "h", "step 1", {"a": 0, "b": 1}, "b", waiting=True, call="y"),
        Position(1, "h", "step 1", {"a": 0, "b": 1}, "b", waiting=True, call="z"),
        Position(3, "h", "step 1", {"a": 1, "b": 0}, "a", waiting=True, call="w"),
    ]
    verdict = judge(mesh, positions, {})
    assert len(verdict.missing) > 1
    assert "is behind: in step 1 it is at" in verdict.text


def test_what_a_rank_says_goes_before_what_is_found() -> None:
    """Of a failure, a stray and a silent rank, the first is the cause, then the second."""
    mesh = {"a": 4}
    astray = Position(1, "h", "step 1", astray="it has made 2 calls", code="here")
    failed = Position(2, "h", "step 1", failed="no data")
    assert (
        judge(mesh, [Position(0, "h", "step 1"), astray, failed], {}).text
        == "rank 2 failed: no data"
    )
    assert (
        "rank 1 has left the plan's order"
        in judge(mesh, [Position(0, "h", "step 1"), astray], {}).text
    )


def test_an_order_that_no_rank_keeps_is_that_of_another_program() -> None:
    positions = [
        Position(rank, "h", "step 1", astray="it has made 2 calls", waiting=rank == 0)
        for rank in range(2)
    ]
    assert "rank 1 did not come" in judge({"a": 2}, positions, {}).text


def test_all_that_wait_together_blame_the_links() -> None:
    positions = [Position(rank, "h", "step 1", {"a": 3}, "a", waiting=True) for rank in range(2)]
    verdict = judge({"a": 2}, positions, {})
    assert not verdict.missing
    assert "none is missing" in verdict.text


@given(st.lists(st.builds(Position, st.integers(), st.text(), st.text(), failed=st.text())))
def test_positions_are_read_as_they_are_written(positions: list[Position]) -> None:
    lines = "".join(json.dumps(asdict(each)) + "\n" for each in positions)
    assert [each.failed for each in read_positions(lines)] == [each.failed for each in positions]


def test_members_of_some_ranks_of_an_axis() -> None:
    mesh = {"pp": 4, "dp": 2}
    assert members(mesh, "pp[0, 3]", 1) == (1, 7)
    assert members(mesh, "pp messages", 3) == (1, 3, 5, 7)
    assert members(mesh, "pp*dp", 3) == tuple(range(8))
