"""torch's allocator: its settings, and its peak beside the account.

On the CPU there is none, so CUDA's is a fake.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_log import small_log
from scalec.runtime.config.plan import Account
from scalec.runtime.train import allocator, launch
from scalec.runtime.train.allocator import Peak, expand_segments
from scalec.runtime.train.options import parse

GIB = 2**30
ACCOUNT = Account("cuda", (50 * GIB,), reserve=3 * GIB)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
        (
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
                "PYTORCH_CUDA_ALLOC_CONF": "backend:native",
            },
            {
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "backend:native",
            },
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(
    given: dict[str, str], left: dict[str, str] | None
) -> None:
    environment = dict(given)
    expand_segments(environment)
    assert environment == (given if left is None else left)


def test_they_are_set_up_before_cuda_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU nothing is."""
    from helpers.bigram import PLAN

    order: list[str] = []
    monkeypatch.setattr(launch, "expand_segments", lambda _: order.append("segments"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: order.append("device"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    plan = replace(PLAN, mesh={"dp": 1})
    launch.connect(plan, parse(plan, ["--device", "cpu"]))
    assert order == []
    launch.connect(plan, parse(plan, ["--device", "cuda"]))
    assert order == ["segments", "device"]


def test_the_peak_is_that_since_the_first_step_began(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, forgotten = torch.device("cuda", 1), list[Any]()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: 5 if device == gpu else 0
    )
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7 if device == gpu else 0)
    allocator.forget(gpu)
    allocator.forget(torch.device("cpu"))
    assert forgotten == [gpu]
    assert allocator.peak(gpu) == Peak(5, 7)
    assert allocator.peak(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("allocated", "differs"), [(50, False), (54, False), (46, False), (55, True), (45, True)]
)
def test_a_step_that_is_not_as_counted_is_told_of(
    allocated: int, differs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3% of 50 GiB and 3 GiB are 4.5."""
    found = Peak(allocated * GIB, 60 * GIB)
    small_log(tmp_path).memory(1, (50 * GIB, 50 * GIB), ACCOUNT, found)
    said = (
        f"memory: tensors took {allocated}.00 GiB, the allocator 60.00 GiB; the account for"
        " cuda says 50.00 GiB"
    )
    further = ": they differ by more than 3% and the reserve of 3.00 GiB" if differs else ""
    assert capsys.readouterr().out == f"{said}{further}\n"
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {
        "step": 1,
        "account": 50 * GIB,
        "reserve": 3 * GIB,
        "allocated": allocated * GIB,
        "reserved": 60 * GIB,
    }


@pytest.mark.parametrize(
    ("allocated", "differs"), [(50, False), (80, False), (85, False), (86, True), (45, True)]
)
def test_with_experts_a_step_may_take_anything_between(
    allocated: int, differs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3% of 80 GiB and 3 GiB are 5.4."""
    account = replace(ACCOUNT, most=(80 * GIB,)).at(0)
    small_log(tmp_path).memory(1, account, ACCOUNT, Peak(allocated * GIB, 90 * GIB))
    said = capsys.readouterr().out
    assert "the account for cuda says 50.00 GiB to 80.00 GiB, as experts are chosen" in said
    assert ("differ by more" in said) == differs
    assert json.loads((tmp_path / "log.jsonl").read_text())["account_at_worst"] == 80 * GIB


def test_on_a_cpu_the_account_stands_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_log(tmp_path).memory(1, (3 * 2**20, 3 * 2**20), Account("cpu", (3 * 2**20,)), None)
    expected = "memory: the account for cpu says 3.00 MiB; torch knows no peak of a CPU's memory\n"
    assert capsys.readouterr().out == expected
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {
        "step": 1,
        "account": 3 * 2**20,
        "reserve": 0,
    }


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    small_log(None).memory(1, (50 * GIB, 50 * GIB), ACCOUNT, None)
    assert capsys.readouterr().out == ""
