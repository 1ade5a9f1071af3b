"""Starts that cannot be: environments that no launcher made, folders that cannot be written to."""

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.bigram import PLAN, build, eval_step, train_step
from scalec.runtime import train
from scalec.runtime.comm import c10d
from scalec.runtime.errors import RunError
from scalec.runtime.train import launch
from scalec.runtime.train.launch import gpu

ALONE = replace(PLAN, mesh={"dp": 1})
TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
NO_NUMBER = "in the environment, where launchers write a number: unset it"


@pytest.fixture
def folder(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with something to train on, a file and a folder; no launcher."""
    (working_folder / "text").mkdir()
    for name in "ab":
        (working_folder / "text" / f"{name}.txt").write_text("abcdefgh " * 40)
    (working_folder / "file").write_text("")
    (working_folder / "link").symlink_to("nowhere")
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    return working_folder


def _refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    ranks: int = 1,
) -> str:
    """What the program says, which does not start."""
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--device=cpu", "--data", "text/*.txt", *options.split()]
    )
    with pytest.raises(SystemExit) as ended:
        train(replace(PLAN, mesh={"dp": ranks}), build, train_step, eval_step)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    return err


@pytest.mark.parametrize(
    ("environment", "ranks", "line"),
    [
        ({"RANK": "x"}, 1, f"RANK is `x` {NO_NUMBER}"),
        ({"RANK": "-1"}, 1, f"RANK is `-1` {NO_NUMBER}"),
        ({"RANK": ""}, 1, f"RANK is `` {NO_NUMBER}"),
        ({"WORLD_SIZE": "two"}, 1, f"WORLD_SIZE is `two` {NO_NUMBER}"),
        ({"LOCAL_RANK": "1.0"}, 1, f"LOCAL_RANK is `1.0` {NO_NUMBER}"),
        ({"LOCAL_WORLD_SIZE": "0"}, 1, f"LOCAL_WORLD_SIZE is `0` {NO_NUMBER}"),
        (TWO | {"MASTER_PORT": "http"}, 2, f"MASTER_PORT is `http` {NO_NUMBER}"),
        (TWO | {"WORLD_SIZE": "0"}, 1, f"WORLD_SIZE is `0` {NO_NUMBER}"),
        ({"RANK": "1"}, 1, "RANK is 1, but WORLD_SIZE is 1; start it with: python train.py"),
        (
            {"WORLD_SIZE": "2"},
            2,
            "the environment lacks `RANK`, `MASTER_ADDR`, `MASTER_PORT`; start it with:"
            " torchrun --standalone --nproc-per-node=2 train.py",
        ),
    ],
)
def test_an_environment_that_no_launcher_made(
    environment: dict[str, str],
    ranks: int,
    line: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _refused(capsys, monkeypatch, "", ranks) == f"error: {line}\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--out file", "cannot write to file: it is a file"),
        ("--out file/below", "cannot write to file/below: Not a directory"),
        ("--out link", "cannot write to link: it is a link to nowhere, which is not there"),
        ("--out /proc/none", "cannot write to /proc/none: No such file or directory"),
    ],
)
def test_folders_that_cannot_be(
    options: str,
    line: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _refused(capsys, monkeypatch, options) == f"error: {line}\n"


def test_an_address_that_is_never_resolved_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(host: str, says: bool) -> None:
        raise RunError(f"MASTER_ADDR is {host}, {says}")

    monkeypatch.setattr(launch, "await_address", give_up)
    for name, value in (TWO | {"MASTER_ADDR": "nowhere", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    assert _refused(capsys, monkeypatch, "", ranks=2) == "error: MASTER_ADDR is nowhere, True\n"


@pytest.mark.parametrize(
    ("gpus", "local", "of", "index"),
    [(8, 3, 8, 3), (1, 0, 1, 0), (1, 3, 8, 0), (8, 2, 4, 2)],
)
def test_a_rank_has_its_own_gpu_or_the_only_one_that_it_sees(
    gpus: int, local: int, of: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert gpu(local, of) == index


@pytest.mark.parametrize("gpus", [0, 2, 7])
def test_too_few_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(RunError, match=r"8 ranks on this node, but . GPU"):
        gpu(0, 8)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("step", "validates", "limit"),
    [(None, False, None), (20.0, False, 80), (20.0, True, 1860), (4000.0, True, 4060)],
)
def test_after_the_first_step_calls_have_the_limit_of_later_ones(
    step: float | None, validates: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Python's collector has less to look at."""
    found = dict[Any, float]()
    monkeypatch.setattr(
        c10d, "set_limit", lambda group, limit: found.update({group: limit.total_seconds()})
    )
    mesh: Any = SimpleNamespace(
        axes={"dp": 2}, size=lambda *_: 2, groups=lambda: {"dp": "the group of dp"}
    )
    options: Any = SimpleNamespace(step_limit=step, first_step_limit=1800.0)
    before = gc.get_freeze_count()
    launch.settle(mesh, options, validates)
    assert gc.get_freeze_count() > before
    assert {*found.values()} == ({limit} if limit else set())
    assert ("the group of dp" in found) == bool(limit)
