"""The undocumented methods of torch.distributed: that they are there, and what is asked of NCCL, which no CPU has."""

import inspect
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.forked_ranks import run_ranks
from scalec.runtime.comm import c10d

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
    assert any(PARAMETER.findall(line.split(" -> ")[0])[1:][: len(asked)] == asked for line in lines), said


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
    """Does at once, and gives no work, what is to be waited for, as ProcessGroupNCCL does since torch 2.8."""

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
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: asked.update(more, backend=backend))
    limit = timedelta(seconds=7)
    c10d.join(torch.device(device), limit)
    assert asked.pop("timeout") == limit
    assert asked == {"backend": backend} | ({"device_id": torch.device(device)} if backend == "nccl" else {})
