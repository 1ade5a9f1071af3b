"""Runs of elastic plans that go on with fewer ranks, and with ranks to spare: their losses and
state are those of a run that nothing disturbs, to rounding, and what they communicate is their
plan."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forked_ranks import HANGS, plain_groups
from helpers.launched import run_file, text_files
from helpers.nodes import HELD, nodes
from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.compiler.proof.recorded import compare
from scalec.runtime.checkpoint.reader import Saved
from scalec.runtime.train import run_folder
from scalec.runtime.train.stop import SAVED
from scalec.testing.faults import Fault, Point, Program, Send, fork

STEPS, HALF, LONG = 4, 2, 20
RUN = Path("runs", "tiny")
CASES = {
    "zero_1": (Case(dp=4, optimizer="groups", clip=1.0, state="zero 1 over dp"), {3: 2, 1: 1}),
    "zero_3": (Case(dp=2, tp=2, sp=True, microbatches=2, clip=1.0, state="zero 3 over dp"), {3: 2}),
    "zero_2": (
        Case(dp=2, cp=2, optimizer="adamw", recompute="full", state="zero 2 over dp, cp"),
        {2: 2},
    ),
    "hybrid": (Case(dp=2, cp=2, optimizer="momentum", state="zero 3 over cp"), {3: 2}),
    "pipeline": (
        Case(dp=2, pp=2, schedule="zb_h1", optimizer="adamw", clip=1.0, state="zero 1 over dp"),
        {3: 2},
    ),
    "fp16": (Case(dp=4, optimizer="adamw", state="zero 1 over dp", precision="fp16"), {3: 2}),
}
"""Plans on four ranks, whose axis dp may have any size; how many ranks are left, and for how
many there is a place.
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_the_ranks_that_are_left(name: str, tmp_path: Path) -> None:
    case, left = CASES[name]
    text = plan_text(case).replace(f"dp = {case.dp}", f"dp = 1..{case.dp}")
    whole = write_program(text, tmp_path / "whole")
    _run(whole, 4, 4)
    for world, places in left.items():
        other = write_program(text, tmp_path / f"{world}")
        middle = RUN / "checkpoints" / f"step-{HALF:06}"
        shutil.copytree(whole / middle, other / middle)
        with plain_groups():
            _run(other, world, places, "--resume", record="1")
        rel = 1e-2 if case.precision == "fp16" else 1e-9
        for got, want in zip(_log(other), _log(whole)[HALF:], strict=True):
            assert got == pytest.approx(want, rel=rel)
        (found, want) = (_state(folder) for folder in (other, whole))
        assert found.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(found[key], value, rtol=rel, atol=rel / 100)
        recorded = compare(other / RUN / "recorded")
        assert recorded.equal, recorded.lines()
        assert recorded.ranks == places


@pytest.mark.long
@pytest.mark.parametrize("state", ["zero 1 over dp", "zero 3 over dp"])
def test_nodes_are_lost_and_come_back(state: str, tmp_path: Path) -> None:
    """Under torchrun, a rank a node: 4 nodes, then 3, of which one stands by, 2 without the
    first one, and 4 again.
    """
    text = plan_text(Case(dp=4, optimizer="groups", clip=1.0, state=state)).replace(
        "dp = 4", "dp = 1..4"
    )
    text += "\ncluster { nodes = 4 }"
    whole, folder = (write_program(text, tmp_path / name) for name in ("whole", "elastic"))
    _run(whole, 4, 4, f"--steps {LONG}")
    text_files(folder)
    options = f"--steps={LONG} --save-every=2 --log-every=1 --eval-every=1000 --data text/*.txt"
    with nodes(folder, 1, 4, 1, options) as cluster:
        holds = [cluster.hold(step) for step in (4, 8, 12, 16)]
        cluster.start("a", "b", "c", "d")
        cluster.saved(4)
        cluster.kill("d")
        holds[0].unlink()
        cluster.said("rank 2 stands by")
        cluster.saved(8)
        cluster.kill("a")
        holds[1].unlink()
        cluster.said("a step, in place of dp 4", 2)
        cluster.saved(12)
        cluster.start("e", "f")
        cluster.said("mesh dp 4 x tp 1: steps 13 to")
        holds[2].unlink()
        cluster.saved(16)
        cluster.kill("e")
        holds[3].unlink()
        cluster.said("rank 2 stands by", 2)
        assert cluster.ended() == {"b": 0, "c": 0, "f": 0}
    steps = {entry["step"]: entry for entry in _log(folder)}
    assert [*steps] == [*range(1, LONG + 1)]
    for want in _log(whole):
        assert steps[want["step"]] == pytest.approx(want, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sent", "ends"), [(signal.SIGUSR1, (SAVED,) * 3), (signal.SIGKILL, (1, -9, 1))]
)
def test_spare_ranks_end_as_the_run_does(
    sent: signal.Signals, ends: tuple[int, ...], tmp_path: Path
) -> None:
    """Where all ranks are signalled to stop, and where one is lost."""
    case, _ = CASES["zero_1"]
    folder = write_program(plan_text(case).replace("dp = 4", "dp = 1..4"), tmp_path)
    text_files(folder)
    ranks = (0, 1, 2) if sent == signal.SIGUSR1 else (1,)
    options = "--device=cpu --steps=100000 --save-every=50000 --data text/a.txt"
    fault = Fault(Point("step", 3), Send(sent, ranks))
    assert fork(Program(folder, 3, options), fault).wait(HANGS).statuses == ends


@pytest.mark.long
def test_a_start_that_was_taken_over_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it saves anything, and whatever it was held up by."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(run_folder, "_PATIENCE", 0.5)
    folder = write_program(plan_text(Case(microbatches=2)), tmp_path)
    text_files(folder)
    (folder / "held.py").write_text(HELD)
    hold = folder / "hold-3"
    hold.touch()
    line = (
        "held.py train.py --device=cpu --steps=6 --save-every=1 --log-every=1 --data"
        " text/a.txt --resume auto"
    )
    first = subprocess.Popen(
        [sys.executable, *line.split()], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    while not (folder / RUN / "checkpoints" / "step-000003").exists():
        assert first.poll() is None
    second = run_file(
        folder, 1, line.removeprefix("held.py train.py").replace("steps=6", "steps=3")
    )
    assert second == [(0, "")]
    hold.unlink()
    _, err = first.communicate(timeout=HANGS)
    assert first.returncode == 1
    assert "error: another start of this run has taken over runs/tiny" in err
    left = {path.name for path in (folder / RUN / "checkpoints").iterdir()}
    assert max(left) == "step-000003"


def _run(folder: Path, world: int, places: int, more: str = "", record: str = "") -> None:
    """All ranks end well, spare ones too; the first names them, and the mesh if it is not the
    largest.
    """
    text_files(folder)
    options = (
        f"--device=cpu --steps {STEPS} --save-every {HALF} --log-every 1 --eval-every 1000"
        " --data text/*.txt"
    )
    ended = run_file(folder, world, f"{options} {more}", record)
    assert [status for status, _ in ended] == [0] * world, ended
    said = ended[0][1]
    assert ("a step, in place of " in said) == (places < 4), said
    assert (f"rank {places} stands by" in said) == (places < world), said


def _log(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / RUN / "log.jsonl").read_text().splitlines())
    keys = ("step", "loss", "norm", "lr", "tokens")
    return [{key: line.get(key) for key in keys} for line in lines if "loss" in line]


def _state(folder: Path) -> dict[str, torch.Tensor]:
    saved = Saved(folder / RUN / "checkpoints" / f"step-{STEPS:06}")
    return saved.whole([*saved.tensors()])
