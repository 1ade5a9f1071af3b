"""Axes and their groups: row-major ranks, joint axes, one process without a group."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.forked_ranks import plain_groups, run_ranks
from scalec.runtime import Mesh, all_gather, all_reduce_


def _peers(names: tuple[str, ...]) -> list[int]:
    mesh = Mesh({"pp": 2, "dp": 2, "tp": 2})
    axis = mesh.axis(*names)
    mine = torch.tensor([mesh.rank("pp", "dp", "tp")])
    gathered = all_gather(mine, axis, dim=0).tolist()
    assert gathered[axis.rank] == mine
    assert axis.rank == mesh.rank(*(name for name in mesh.axes if name in names))
    return gathered


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("tp",), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (("pp",), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (("pp", "tp"), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (("tp", "pp"), [[0, 1, 4, 5], [2, 3, 6, 7]]),  # in mesh order, however asked for
        (("pp", "dp", "tp"), [list(range(8))]),
    ],
)
def test_an_axis_is_its_ranks_in_row_major_order(
    names: tuple[str, ...], expected: list[list[int]]
) -> None:
    results = run_ranks(8, _peers, names)
    assert {tuple(peers) for peers in results} == {tuple(peers) for peers in expected}
    assert all(rank in peers for rank, peers in enumerate(results))


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh({"dp": 1, "tp": 1})
    axis = mesh.axis("dp", "tp")
    x = torch.randn(3)
    assert (axis.size, axis.rank, axis.group, axis.name) == (1, 0, None, "dp*tp")
    assert all_gather(x, axis, dim=0) is x
    assert all_reduce_(x, axis) is x


def _groups() -> tuple[bool, bool, bool]:
    mesh = Mesh({"dp": 1, "tp": 2})
    return (
        mesh.axis("dp").group is None,
        mesh.axis("dp", "tp").size == 2,
        mesh.axis("tp") is mesh.axis("tp"),
    )


def test_axes_of_size_one_have_no_group() -> None:
    assert run_ranks(2, _groups) == [(True, True, True)] * 2


# ---- how many groups, and by how many calls

LARGE = {"pp": 16, "dp": 128, "tp": 8}


class _Calls:
    """Calls to torch that make groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.splits, self.made = list[list[list[int]]](), 0
        new: Any = dist.new_group

        def split(_: Any, rows: list[list[int]], **__: Any) -> Any:
            self.splits.append(rows)
            own = next(row for row in rows if dist.get_rank() in row)
            return new([*own], use_local_synchronization=True)

        def counted(*given: Any, **named: Any) -> Any:
            self.made += 1
            return new(*given, **named)

        monkeypatch.setattr(dist, "split_group", split)
        monkeypatch.setattr(dist, "new_group", counted)


@pytest.fixture(params=[0, 5001, 16383])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Calls]:
    """A rank of 16,384, none of which is there."""
    with plain_groups():
        dist.init_process_group(
            "fake", rank=request.param, world_size=prod(LARGE.values()), store=FakeStore()
        )
        yield _Calls(monkeypatch)
        dist.destroy_process_group()


def _axes(mesh: Mesh) -> list[Any]:
    return [
        mesh.axis("dp", "tp"),
        mesh.axis("pp", "dp", "tp"),
        mesh.messages("pp"),
        mesh.among("pp", 0, 15),
        mesh.axis("tp", "dp"),
    ]


def test_each_group_of_16_384_ranks_is_one_split_of_the_whole_job(calls: _Calls) -> None:
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda:0")
    axes = _axes(Mesh(LARGE))
    assert len(calls.splits) == len(["pp", "dp", "tp", "dp*tp", "pp messages", "pp[0, 15]"])
    assert not calls.made
    for rows in calls.splits:
        assert sorted(rank for row in rows for rank in row) == [*range(16384)], (
            "each rank has one row"
        )
        assert all(a < b for row in rows for a, b in pairwise(row)), "as torch sorts them"
    assert {len(rows) for rows in calls.splits} == {1024, 128, 2048, 16, 1024 * 15}
    assert [len(axis.ranks()) for axis in axes] == [
        1024,
        16384,
        16,
        2 if axes[3].size == 2 else 1,
        1024,
    ]


def test_without_splits_a_rank_makes_its_own_groups_alone(calls: _Calls) -> None:
    _axes(Mesh(LARGE))
    assert (len(calls.splits), calls.made) == (0, 6)


def test_torchs_own_mesh_has_the_same_groups(calls: _Calls) -> None:
    mesh = Mesh({"one": 1, **LARGE})
    made = calls.made
    assert mesh.device_mesh is not None
    assert [mesh.device_mesh.get_group(name) for name in LARGE] == [
        mesh.axis(name).group for name in LARGE
    ]
    assert [*(mesh.device_mesh.get_coordinate() or ())] == [0, *(mesh.rank(name) for name in LARGE)]
    assert calls.made == made + 1, "of the axis of one rank, which else has none"


# ---- groups that some ranks ask for


def _asked() -> tuple[list[str], list[int]]:
    mesh = Mesh({"pp": 2, "dp": 2, "tp": 2})
    with mesh.asking():
        axis = mesh.axis("dp", "tp") if mesh.rank("pp") else None
        assert axis is None or axis.group is None
    if axis is not None:
        assert all_gather(torch.tensor([dist.get_rank()]), axis, dim=0).tolist() == axis.ranks()
    return sorted(mesh.groups()), mesh.axis("dp", "tp").ranks()


def test_groups_that_some_ranks_ask_for_are_made_by_all() -> None:
    names = ["dp", "dp*tp", "pp", "tp"]
    assert run_ranks(8, _asked) == [(names, [0, 1, 2, 3])] * 4 + [(names, [4, 5, 6, 7])] * 4
