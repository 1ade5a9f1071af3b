"""Throughput in the log beside the prediction: where it is compared, and when a run says that
it is slow.
"""

import json
from pathlib import Path

import pytest
import torch

from helpers.small_log import small_log
from scalec.runtime.config.plan import Expected, Metrics
from scalec.runtime.train import log
from scalec.runtime.train.speed import OFTEN, Speed, is_of

EXPECTED = Expected("cpu", seconds=2.0, error=0.1, flops_per_token=5, peak_flops=100.0)
"""Of 40 tokens: 20 a second, 100 operations a second, which are all that the device does."""

METRICS = Metrics(loss=torch.tensor(2.0), tokens=torch.tensor(4))


class _Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    monkeypatch.setattr(log, "time", clock := _Clock())
    return clock


def test_a_line_has_the_rate_of_a_rank_its_mfu_and_the_prediction() -> None:
    speed = Speed(80, 2, torch.device("cpu"), EXPECTED)
    assert speed.words(4.0) == "10 tokens/s/process (MFU 50.0%, predicted 20)"
    assert speed.values(4.0) == {
        "tokens_per_s": 20, "tokens_per_s_process": 10, "mfu": 0.5, "predicted_tokens_per_s_process": 20
    }  # fmt: skip
    assert speed.begin() == "predicted on cpu: 2.00 s a step, 20 tokens/s/process, within 10%"


def test_on_another_device_nothing_is_compared() -> None:
    other = Expected("h100_sxm", seconds=1e-6, error=0.1, flops_per_token=5, peak_flops=100.0)
    speed = Speed(80, 2, torch.device("cpu"), other)
    assert (speed.begin(), speed.words(4.0), speed.complaint(4.0)) == (
        "",
        "10 tokens/s/process",
        "",
    )
    assert speed.values(4.0) == {"tokens_per_s": 20, "tokens_per_s_process": 10}


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("h100_sxm", "NVIDIA H100 80GB HBM3"),
        ("h100_pcie", "NVIDIA H100 PCIe"),
        ("a100_80gb", "NVIDIA A100-SXM4-80GB"),
        ("rtx_4090", "NVIDIA GeForce RTX 4090"),
        ("rtx_a6000", "NVIDIA RTX A6000"),
        ("v100_16gb", "Tesla V100-SXM2-16GB"),
        ("l4", "NVIDIA L4"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_known_by_its_own_name(gpu: str, device: str) -> None:
    assert is_of(gpu, device)
    others = (
        "NVIDIA L40S",
        "NVIDIA GH200 480GB",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 3090",
        "Tesla T4",
    )
    assert not any(is_of(gpu, other) for other in others)


def test_steps_are_slow_only_beyond_the_error_and_say_so_now_and_then() -> None:
    speed = Speed(40, 1, torch.device("cpu"), EXPECTED)
    assert not speed.complaint(2.19)
    said = [speed.complaint(3.0) for _ in range(2 * OFTEN)]
    assert [bool(each) for each in said] == ([True] + [False] * (OFTEN - 1)) * 2
    assert said[0] == "slow: 3.00 s a step, 50% more than predicted, with an error of at most 10%"


def test_first_steps_and_validation_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: _Clock
) -> None:
    """The second step takes as long as predicted, after minutes of other work; the third does
    not.
    """
    written = small_log(tmp_path, 40, expected=EXPECTED)
    for step, (before, seconds) in enumerate(((0, 500), (300, 2), (0, 4)), start=1):
        clock.now += before
        written.mark(step - 1)
        clock.now += seconds
        written.step(step, METRICS, 0.1)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "slow" in line] == [lines[3]]
    assert "20 tokens/s/process (MFU 100.0%, predicted 20)" in lines[1]
    assert lines[3].startswith("slow: 4.00 s a step, 100% more")
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["tokens_per_s_process"] for record in records] == [0.08, 20, 10]


def test_a_step_that_is_looked_at_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: _Clock
) -> None:
    written = small_log(tmp_path, 40, expected=EXPECTED)
    for step in (1, 2, 3):
        if step == 2:
            written.note_observed(step)
        clock.now += 4
        written.step(step, METRICS, 0.1)
    *_, third = [
        at for at, line in enumerate(capsys.readouterr().out.splitlines()) if "slow" not in line
    ]
    assert third == 2


def test_steps_that_are_profiled_are_not_compared_and_later_ones_say_where_they_are_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: _Clock
) -> None:
    written = small_log(tmp_path, 40, expected=EXPECTED, steps=6, warm_up=5)
    written.slow_lines = lambda: "m.scale:2 100.0 ms in place of 0.0"
    for step in range(1, 7):
        clock.now += 10
        written.step(step, METRICS, 0.1)
    lines = capsys.readouterr().out.splitlines()
    assert [at for at, line in enumerate(lines) if "slow" in line] == [6]
    assert lines[6].endswith("at most 10%; most at m.scale:2 100.0 ms in place of 0.0")
