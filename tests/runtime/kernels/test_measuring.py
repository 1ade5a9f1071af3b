"""One failure ends no table of `benchmarks/one_gpu.py`; sizes can be chosen.

Without a GPU, where nothing is timed.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A benchmark's module by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def _failing(*_: object) -> Any:
    raise ValueError("no such kernel\nand more")


def test_a_kernel_that_fails_is_a_row(measuring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, subjects = measuring("gpu"), measuring("gpu_kernels")
    monkeypatch.setattr(subjects, "_SUBJECTS", {"RMSNorm": _failing})
    machine = gpu.Machine(torch.device("cpu"), toy=True, repeats=1)
    rows = [*subjects.kernel_rows(machine)]
    assert [row[0] for row in rows] == ["device copy", "RMSNorm", "AdamW", "Accumulate"]
    assert rows[1][2] == "failed: ValueError: no such kernel"
    assert {len(row) for row in rows} == {len(subjects.KERNELS)}


def test_a_program_that_fails_is_a_row(measuring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, steps = measuring("gpu"), measuring("gpu_steps")
    monkeypatch.setattr(steps, "_made", _failing)
    machine = gpu.Machine(torch.device("cpu"), toy=True, repeats=1)
    rows = [*steps.step_rows(machine, "1B")]
    assert [row[2] for row in rows] == [
        each.name for each in (*steps.PROGRAMS[1:], steps.PROGRAMS[0])
    ]
    assert {row[3] for row in rows} == {"failed: ValueError: no such kernel"}
    assert {len(row) for row in rows} == {len(steps.STEPS)}
    assert {len(row) for row in steps.op_rows(machine, "1B")} == {len(steps.OPS)}


def test_memory_that_is_not_there_is_no_failure(measuring: Any) -> None:
    machine = measuring("gpu").Machine(torch.device("cpu"), toy=True, repeats=1)
    assert machine.failure(torch.OutOfMemoryError("CUDA")) == "out of memory"


def test_sequences_can_be_chosen(measuring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "--only step --seqs 4096,32768"
    monkeypatch.setattr(sys, "argv", ["one_gpu.py", *asked.split()])
    assert measuring("one_gpu")._options().seqs == (4096, 32768)


@pytest.mark.parametrize("name", ["on_a_gpu.sh", "first_half_hour.sh"])
def test_scripts_for_a_gpu_are_shell(name: str) -> None:
    subprocess.run(["bash", "-n", BENCHMARKS / name], check=True)
