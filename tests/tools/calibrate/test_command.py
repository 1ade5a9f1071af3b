"""`scalec calibrate`: the command that it starts or prints, and the mistakes that it tells."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from scalec.compiler import cli

MODEL = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 8  hidden = 4 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 2  tp = 2 }
shard { batch over dp  vocab over tp }
train {
  seq = 16  global_batch = 8  microbatch = 2  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = ["a"] }
}
"""


@pytest.fixture(autouse=True)
def started(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that take this process' place."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append(words))  # type: ignore[misc]
    (working_folder / "tiny.scale").write_text(MODEL)
    return commands


def test_a_rank_of_the_plan_is_started_for_each_of_its_groups(
    started: list[list[str]], tmp_path: Path
) -> None:
    assert cli.main(["calibrate", "tiny.scale", "-o", "mine.toml", "--quick"]) == 0
    (words,) = started
    assert "--nproc-per-node=4" in words
    assert words[words.index("scalec.tools.calibrate") + 1 :][:3] == [
        "mine.json",
        "-o",
        "mine.toml",
    ]
    listed = json.loads((tmp_path / "mine.json").read_text())
    assert {*map(tuple, (it["axes"] for it in listed["groups"]))} == {("dp",), ("tp",)}


def test_on_several_nodes_it_prints_the_command_for_each(
    started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.scale").write_text("cluster { gpus_per_node = 2  nodes = 2 }\n" + MODEL)
    assert cli.main(["calibrate", "tiny.scale"]) == 0
    assert "torchrun --nnodes=2 --nproc-per-node=2" in capsys.readouterr().out
    assert not started


def test_a_machine_without_a_gpu_is_told_before_ranks_start(
    started: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tiny.scale").write_text("cluster { gpu = h100_sxm }\n" + MODEL)
    seen: list[int] = [1]
    monkeypatch.setattr(
        subprocess, "run", lambda words: subprocess.CompletedProcess(words, seen.pop())
    )  # type: ignore[misc]
    assert cli.main(["calibrate", "tiny.scale"]) == 2
    assert "this machine has none: calibrate on the machine that trains" in capsys.readouterr().err
    assert not started
    assert not (tmp_path / "my_cluster.json").exists()
    seen = [0]
    assert cli.main(["calibrate", "tiny.scale"]) == 0
    assert len(started) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "PLAN"),
        (["tiny.scale", "-o", "nowhere/mine.toml"], "there is no folder `nowhere`"),
        (["tiny.scale", "-o", "."], "is a folder"),
        (["tiny.scale", "-o", "theirs.toml"], "was not written by scalec"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    words: list[str],
    told: str,
    started: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "theirs.toml").write_text("a = 1")
    try:
        status = cli.main(["calibrate", *words])
    except SystemExit as end:  # as argparse ends
        status = int(end.code or 0)
    assert status == 2
    assert told in capsys.readouterr().err
    assert not started


def test_a_file_of_its_own_is_written_once_more(started: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("# Written by scalec 0.1.0\n")
    for _ in range(2):
        assert cli.main(["calibrate", "tiny.scale", "-o", "mine.toml"]) == 0
    assert len(started) == 2
