"""Axes and their groups: row-major ranks, joint axes, one process without a group."""

import pytest
import torch

from helpers.forked_ranks import run_ranks
from scalec.runtime import Mesh, all_gather, all_reduce_


def _peers(names: tuple[str, ...]) -> list[int]:
    mesh = Mesh({"pp": 2, "dp": 2, "tp": 2})
    axis = mesh.axis(*names)
    mine = torch.tensor([mesh.rank("pp", "dp", "tp")])
    gathered = all_gather(mine, axis, dim=0).tolist()
    assert gathered[axis.rank] == mine
    assert axis.rank == mesh.rank(*(name for name in mesh.axes if name in names))
    return gathered


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
def test_an_axis_is_its_ranks_in_row_major_order(names: tuple[str, ...], expected: list[list[int]]) -> None:
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
    return mesh.axis("dp").group is None, mesh.axis("dp", "tp").size == 2, mesh.axis("tp") is mesh.axis("tp")


def test_axes_of_size_one_have_no_group() -> None:
    assert run_ranks(2, _groups) == [(True, True, True)] * 2
