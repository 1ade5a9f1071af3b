"""When a step's line is written: on the CPU at once, on a GPU behind the step that the device
was given meanwhile.
"""

import json
import os
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

from helpers.small_log import small_log
from scalec.runtime.config.plan import Metrics
from scalec.runtime.train.launch import settle_streams


def _metrics(device: str, loss: float = 2.0) -> Metrics:
    return Metrics(loss=torch.tensor(loss, device=device), tokens=torch.tensor(4, device=device))


def test_on_the_cpu_a_line_is_written_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_log(tmp_path).step(1, _metrics("cpu"), 0.1)
    assert capsys.readouterr().out.startswith("step 1/3  loss 2.0000")


def test_a_line_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = small_log(tmp_path)
    log.settle()
    log.step(1, _metrics("cpu"), 0.1)
    log.settle()
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_line_has_the_worst_loads_of_all_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers, other = torch.tensor([[4, 4, 4, 4], [2, 10, 0, 4]]), torch.tensor([3, 5])
    metrics = Metrics(torch.tensor(2.0), torch.tensor(4), loads=(layers, other))
    small_log(tmp_path).step(1, metrics, 0.1)
    assert "  load 0.00 to 2.50  " in capsys.readouterr().out
    (record,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert record["expert_load"] == [[4, 4, 4, 4], [2, 10, 0, 4], [3, 5]]


def test_a_line_has_the_part_of_choices_that_no_expert_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 8 tokens with 2 choices in each of 2 layers 24 of 32 were taken, and of 8 with one in
    another 7.
    """
    layers, other = torch.tensor([[4, 4, 4], [4, 4, 4]]), torch.tensor([3, 4])
    metrics = Metrics(torch.tensor(2.0), torch.tensor(8), loads=(layers, other))
    small_log(tmp_path, 8, (2, 1)).step(1, metrics, 0.1)
    assert "  dropped 22.5%  " in capsys.readouterr().out
    (record,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert record["dropped"] == pytest.approx(9 / 40)


@pytest.mark.gpu
def test_on_a_gpu_a_line_waits_for_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = small_log(tmp_path)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        log.step(1, _metrics("cuda"), 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not capsys.readouterr().out
    log.settle()
    assert capsys.readouterr().out.startswith("step 1/3  loss 2.0000")


def test_a_line_says_that_its_step_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_log(tmp_path).step(1, _metrics("cpu", loss=torch.nan), 0.1)
    line = capsys.readouterr().out
    assert "loss nan" in line
    assert "  skipped  " in line
    (record,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert record["skipped"]
    assert "loss" not in record


@pytest.mark.parametrize("due", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_step_that_is_skipped_has_one_record(tmp_path: Path, due: bool, later: bool) -> None:
    """Of the step before too, as on a GPU, where it is known when the next one has been handed
    over.
    """
    log = small_log(tmp_path)
    if later:
        log.step(1, _metrics("cpu"), 0.1, due=False)
    log.note_skipped(1, "step 1: loss 9.0 is a spike")
    log.settle()
    log.step(2 if later else 1, _metrics("cpu"), 0.1, due)
    log.settle()
    records = [*map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())]
    assert [record["step"] for record in records] == [1] + [2] * (later and due)
    assert records[0]["skipped"]
    assert ("loss" in records[0]) == (due and not later)


def test_a_terminal_that_lacks_a_sign_shows_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(seen, "ascii"))
    settle_streams()
    small_log(tmp_path).say("größe → ×")
    assert seen.getvalue() == b"gr\\xf6\\xdfe \\u2192 \\xd7\n"


def test_a_run_goes_on_though_nobody_reads_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        log = small_log(tmp_path)
        for step in (1, 2):
            log.step(step, _metrics("cpu"), 0.1)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
