"""The script of `scalec launch slurm` on a real Slurm of this machine, where one is installed:
three ways to end early.

Each run ends as one that nothing has disturbed, bit for bit.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.launched import run_file
from helpers.real_slurm import INSTALLED, NODES, Cluster
from scalec.compiler.cli import main
from scalec.runtime.checkpoint.reader import Saved

pytestmark = [pytest.mark.long, pytest.mark.skipif(not INSTALLED, reason="Slurm is not installed")]
PLAN = """
model bigram(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 8 }
  init ~ normal(0.02)
  loss = cross_entropy(embedding(tokens, wte[vocab, hidden]) @ head[hidden -> vocab], labels)
}
mesh { dp = 2 }
shard { batch over dp }
cluster { nodes = 2 }
train {
  seq = 8  global_batch = 4  microbatch = 2  steps = 400
  optimizer adamw { lr = 1e-2 }
  data text { files = ["text/*.txt"] }
}
"""
SLOW = f"""#!{sys.executable}
import runpy, sys, time
from pathlib import Path
from scalec.runtime import Loader
prepared = Loader.prepared
def slowly(self, step):
    if step > 9 and Path("slow").exists():
        time.sleep(0.5)
    return prepared(self, step)
Loader.prepared = slowly
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Python, in which steps are slow while there is a file."""


@pytest.fixture
def folder(working_folder: Path) -> Path:
    """The working directory, with a job's script."""
    (working_folder / "text").mkdir()
    (working_folder / "text/a.txt").write_bytes(bytes(i * 7 % 97 for i in range(900)))
    (working_folder / "slow").touch()
    (working_folder / "plan.scale").write_text(PLAN)
    times = ("--cpus", "1", "--time", "0:03:00", "--grace", "120")
    words = ("--save-every", "5", "--keep", "3", "--out", "run", "--device", "cpu")
    assert (
        main(["launch", "slurm", "plan.scale", "-o", "out", "--no-verify", *times, "--", *words])
        == 0
    )
    (python := working_folder / "python").write_text(SLOW)
    python.chmod(0o755)
    return working_folder


def _submitted(slurm: Cluster) -> str:
    return slurm.submit(
        slurm.folder / "out/job.sbatch", PYTHON=str(slurm.folder / "python"), OMP_NUM_THREADS="1"
    )


def _is(slurm: Cluster, job: str, **state: str) -> Callable[[], bool]:
    def true() -> bool:
        found = slurm.state(job)
        assert found["JobState"] not in ("FAILED", "TIMEOUT"), slurm.logs()
        return state.items() <= found.items()

    return true


def _saves(slurm: Cluster) -> None:
    slurm.until((slurm.folder / "run/checkpoints/step-000010/index.json").exists)


def _ended(folder: Path) -> str:
    """The lines of the job, whose last checkpoint is that of a run that nothing has disturbed."""
    assert (
        run_file(folder / "out", 2, "--out ../whole --data ../text/*.txt --device cpu")
        == [(0, "")] * 2
    )
    ends = (
        Saved(folder / f"{run}/checkpoints/step-000400").whole(["wte", "head"])
        for run in ("run", "whole")
    )
    assert all(map(torch.equal, *(end.values() for end in ends)))
    return "".join(log.read_text() for log in folder.glob("plan-*.log"))


def test_a_job_whose_time_ends_saves_is_requeued_and_goes_on(folder: Path) -> None:
    with Cluster(folder, 2) as slurm:
        job = _submitted(slurm)
        slurm.until(_is(slurm, job, Restarts="1"))
        (folder / "slow").unlink()
        slurm.until(_is(slurm, job, JobState="COMPLETED", ExitCode="0:0"))
    told = _ended(folder)
    assert "stopped by SIGUSR1: saved run/checkpoints/step-" in told
    assert "resuming from run/checkpoints/step-" in told


def test_a_job_that_loses_a_node_goes_on_with_another(folder: Path) -> None:
    with Cluster(folder, 3) as slurm:
        job = _submitted(slurm)
        _saves(slurm)
        slurm.lose(NODES[1])
        (folder / "slow").unlink()
        slurm.until(
            _is(slurm, job, JobState="COMPLETED", Restarts="1", NodeList=f"{NODES[0]},{NODES[2]}")
        )
    assert "resuming from run/checkpoints/step-" in _ended(folder)


def test_a_job_that_is_cancelled_saves_and_a_new_one_goes_on(folder: Path) -> None:
    with Cluster(folder, 2) as slurm:
        job = _submitted(slurm)
        _saves(slurm)
        slurm.cancel(job)
        slurm.until(_is(slurm, job, JobState="CANCELLED", Restarts="0"))
        (folder / "slow").unlink()
        slurm.until(_is(slurm, _submitted(slurm), JobState="COMPLETED", Restarts="0"))
    told = _ended(folder)
    assert "stopped by SIGTERM: saved run/checkpoints/step-" in told
    assert "resuming from run/checkpoints/step-" in told
