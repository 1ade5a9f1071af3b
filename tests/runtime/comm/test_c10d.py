"""The undocumented methods of torch.distributed: that they are there, and what is asked of
NCCL, which no CPU has.
"""

import inspect
import re
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.forked_ranks import plain_groups, run_ranks
from scalec.runtime.comm import c10d
from scalec.runtime.comm.store import job_store
from scalec.runtime.errors import RunError

SIGNATURES = {
    "allreduce": ["tensors", "opts"],
    "_allgather_base": ["output", "input", "opts"],
    "_reduce_scatter_base": ["outputTensor", "inputTensor", "opts"],
    "alltoall_base": ["output", "input", "output_split_sizes", "input_split_sizes", "opts"],
    "send": ["tensors", "dstRank", "tag"],
    "recv": ["tensors", "srcRank", "tag"],
    "_start_coalescing": ["device_type"],
    "_end_coalescing": ["device_type"],
    "_get_backend": ["device"],
}
PARAMETER = re.compile(r"(\w+): ")


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_of_a_group_have_the_signatures_that_are_used(name: str) -> None:
    said: str = getattr(dist.ProcessGroup, name).__doc__
    lines = [line for line in said.splitlines() if f"{name}(self" in line]
    asked = SIGNATURES[name]
    assert any(
        PARAMETER.findall(line.split(" -> ")[0])[1:][: len(asked)] == asked for line in lines
    ), said


def test_functions_have_the_parameters_that_are_used() -> None:
    torch_dist: Any = dist
    for function, asked in [
        (torch_dist.init_process_group, {"backend", "timeout", "device_id"}),
        (torch_dist.split_group, {"parent_pg", "split_ranks", "timeout", "group_desc"}),
        (torch_dist.new_group, {"ranks", "timeout", "use_local_synchronization", "group_desc"}),
    ]:
        assert asked <= {*inspect.signature(function).parameters}
    assert callable(torch_dist.distributed_c10d._get_default_store)
    assert isinstance(dist.ProcessGroup.bound_device_id, property)


class _Nccl:
    """Does at once, and gives no work, what is to be waited for, as ProcessGroupNCCL does since
    torch 2.8.
    """

    def __init__(self) -> None:
        self.under_way = 0

    def _called(self, *given: Any) -> Any:
        if not getattr(given[-1], "asyncOp", True):
            return None
        self.under_way += 1
        return SimpleNamespace(wait=self._waited)

    def _waited(self) -> None:
        self.under_way -= 1

    allreduce = _allgather_base = _reduce_scatter_base = alltoall_base = _called


def test_collectives_that_are_waited_for_are_on_the_current_stream() -> None:
    group, x = _Nccl(), torch.zeros(4)
    c10d.all_reduce(x, group)
    c10d.maximum(x, group)
    c10d.all_gather(x, x[:2], group)
    c10d.reduce_scatter(x[:2], x, group)
    c10d.all_to_all(x, x, group)
    assert not group.under_way
    begun = [
        c10d.begin_all_reduce(x, group),
        c10d.begin_all_gather(x, x[:2], group),
        c10d.begin_reduce_scatter(x[:2], x, group),
        c10d.begin_all_to_all(x, x, group),
    ]
    assert group.under_way == 4
    for work in begun:
        work.wait()
    assert not group.under_way


def _collectives() -> list[list[float]]:
    group, rank = dist.group.WORLD, dist.get_rank()
    x, largest, whole = torch.tensor([1.0, rank]), torch.tensor([1.0, rank]), torch.zeros(4)
    c10d.all_reduce(x, group)
    c10d.maximum(largest, group)
    c10d.all_gather(whole, torch.tensor([rank, 10.0 + rank]), group)
    part, came = torch.zeros(2), torch.zeros(2)
    c10d.reduce_scatter(part, torch.tensor([1.0, 2, 3, 4]), group)
    c10d.all_to_all(came, torch.tensor([10.0 * rank, 10.0 * rank + 1]), group)
    return [each.tolist() for each in (x, largest, whole, part, came)]


def test_gloo_waits_all_the_same() -> None:
    both = [[2, 1], [1, 1], [0, 10, 1, 11]]
    assert run_ranks(2, _collectives) == [[*both, [2, 4], [0, 10]], [*both, [6, 8], [1, 11]]]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_a_job_has_one_backend(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **more: asked.update(more, backend=backend)
    )
    limit = timedelta(seconds=7)
    c10d.join(torch.device(device), limit)
    assert asked.pop("timeout") == limit
    assert asked == {"backend": backend} | (
        {"device_id": torch.device(device)} if backend == "nccl" else {}
    )


# ---- rows of a split


def _merged(rows: list[list[int]]) -> list[int]:
    """How many rows each communicator has, which has all ranks of a colour: torch's hash of a
    row's ranks.
    """
    most = max(map(len, rows))
    mixed = np.zeros(len(rows), dtype=np.uint64)
    for at in range(most):
        there = np.array([len(row) > at for row in rows])
        rank = np.array([row[at] if len(row) > at else 0 for row in rows], dtype=np.uint64)
        with np.errstate(over="ignore"):
            next_one = mixed ^ (
                rank + np.uint64(0x9E3779B9) + (mixed << np.uint64(6)) + (mixed >> np.uint64(2))
            )
        mixed = np.where(there, next_one, mixed)
    colours = np.abs(mixed.astype(np.int64)) % (2**31 - 1)
    return np.unique(colours, return_counts=True)[1].tolist()


def _demand_apart(rows: list[list[int]], most: int) -> int:
    """Each call has each rank once and merges no rows, and each row is made once, in a few
    calls.
    """
    ranks = sorted(rank for row in rows for rank in row)
    calls = [*c10d.splits_of_rows(rows)]
    for some in calls:
        assert sorted(rank for row in some for rank in row) == ranks
        assert all(a < b for row in some for a, b in pairwise(row))
        assert {*_merged(some)} == {1}
    made = Counter(tuple(row) for some in calls for row in some)
    assert all(made[tuple(row)] == 1 for row in rows if len(row) > 1)
    assert len(calls) <= most
    return len(calls)


def _rows(stages: int, inner: int, chosen: tuple[int, ...]) -> list[list[int]]:
    """Of each rank of some stages one row, and all others by themselves: `mesh.among`."""
    rows = [[stage * inner + at for stage in chosen] for at in range(inner)]
    return [
        *rows,
        *(
            [stage * inner + at]
            for stage in range(stages)
            if stage not in chosen
            for at in range(inner)
        ),
    ]


def test_rows_of_16_384_ranks_are_not_merged() -> None:
    """Two stages that share a weight, of 16 and of 8; pairs of neighbours.

    One split would merge some of most.
    """
    every = [_rows(16, 1024, pair) for pair in ((0, 15), (1, 10), (13, 15))] + [
        _rows(8, 2048, (0, 5))
    ]
    every.append([[rank, rank + 1] for rank in range(0, 16384, 2)])
    assert [sum(n - 1 for n in _merged(rows)) for rows in every] == [0, 29, 1, 16, 10]
    assert [_demand_apart(rows, 3) for rows in every] == [1, 2, 2, 2, 2]


@given(data=st.data())
def test_rows_of_any_ranks_are_not_merged(data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=60, unique=True))
    cuts = sorted({0, len(ranks), *data.draw(st.lists(st.integers(0, len(ranks)), max_size=30))})
    _demand_apart([sorted(ranks[a:b]) for a, b in pairwise(cuts)], 3)


def test_rows_of_one_colour_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank by itself has that of a row."""
    monkeypatch.setattr(
        c10d,
        "_colour",
        lambda row: {(0, 1): 7, (2, 3): 7, (0, 2): 7, (4,): 7}.get(tuple(row), str(row)),
    )
    assert [*c10d.splits_of_rows([[0, 1], [2, 3], [4], [5]])] == [
        [[0, 1], [2], [3], [4, 5]],
        [[2, 3], [0], [1], [4, 5]],
    ]


def test_a_rank_gets_the_group_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device("cuda:0")))
    monkeypatch.setattr(
        c10d, "splits_of_rows", lambda rows: [[[0, 1], [2], [3]], [[0], [1], [2, 3]]]
    )
    monkeypatch.setattr(c10d, "_check_members", lambda *_: None)
    for rank, row in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):

        def split(_: Any, rows: list[list[int]], rank: int = rank, **__: Any) -> list[int]:
            return next(row for row in rows if rank in row)

        torch_dist = SimpleNamespace(group=job, get_rank=lambda rank=rank: rank, split_group=split)
        monkeypatch.setattr(c10d, "dist", torch_dist)
        assert c10d.group_of([[0, 1], [2, 3]], "pp[0, 1]", timedelta(seconds=1)) == row


MERGING, ROWS = [0, 1, 2, 3], [[[0, 1], [2, 3]], [[0], [1], [2, 3]], [[0, 1, 2], [3]]]


def _group(rows: list[list[int]], merged: list[int], splits: bool) -> str:
    """The error of a rank whose backend makes one communicator of all rows within `merged`."""
    real: Any = dist

    def get_ranks(row: list[int]) -> list[int]:
        return merged if set(row) <= set(merged) else row

    def split_group(_: Any, some: list[list[int]], **__: Any) -> Any:
        row = next(row for row in some if dist.get_rank() in row)
        return real.new_group(get_ranks(row), use_local_synchronization=True)

    def new_group(row: list[int], **__: Any) -> Any:
        return real.new_group(get_ranks(row), use_local_synchronization=True)

    device = torch.device("cpu") if splits else None
    job = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=device))
    usual = {"get_rank": dist.get_rank, "get_backend": dist.get_backend}
    c10d.dist = SimpleNamespace(group=job, split_group=split_group, new_group=new_group, **usual)
    try:
        c10d.group_of(rows, "dp", timedelta(seconds=60))
    except RunError as error:
        return str(error)
    finally:
        c10d.dist = dist
    return ""


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_two_rows_in_one_communicator_are_an_error_on_all_their_ranks(
    rows: list[list[int]], splits: bool
) -> None:
    """As where torch's hash of rows is another than the one that `apart` knows."""
    lines = run_ranks(4, _group, rows, MERGING, splits)
    for rank, line in enumerate(lines):
        ranks = ", ".join(map(str, next(row for row in rows if rank in row)))
        assert line.startswith(
            f"the communicator of dp for ranks {ranks} has other ranks than these: its sums would"
        )


@pytest.mark.parametrize("splits", [True, False])
def test_rows_in_communicators_of_their_own_are_none(splits: bool) -> None:
    assert run_ranks(4, _group, [[0, 1], [2, 3]], [], splits) == [""] * 4


# ---- limits, records, versions


def _late() -> str:
    group, rank = dist.group.WORLD, dist.get_rank()
    c10d.set_limit(group, timedelta(seconds=1))
    if rank:
        job_store().wait(["ended"])
        return ""
    try:
        c10d.all_reduce(torch.ones(1), group)
        return "done"
    except RuntimeError as error:
        return str(error)
    finally:
        job_store().set("ended", "")


def test_a_group_has_the_limit_of_later_calls() -> None:
    with plain_groups():
        first, _ = run_ranks(2, _late)
    assert "1000ms" in first, first


def test_without_a_job_a_process_is_the_first_of_one() -> None:
    assert c10d.place() == (0, 1)


NEWER = "note: torch {} is newer than those that scalec was tried with, up to 2.14"


@pytest.mark.parametrize(
    ("version", "note"), [("2.11.0", ""), ("2.14.1+cu130", ""), ("2.15.0", NEWER), ("3.0", NEWER)]
)
def test_newer_versions_of_torch_than_were_tried_are_told(version: str, note: str) -> None:
    assert c10d.warning_of_new_version(version) == note.format(version)


def test_a_torch_without_what_is_called_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout")
    with pytest.raises(
        RunError, match=r"torch 2\.15\.0 has no `_set_pg_timeout`, which .*: install torch 2\.14$"
    ):
        c10d.warning_of_new_version("2.15.0")
