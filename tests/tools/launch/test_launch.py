"""`scalec launch` and `scalec doctor`: the scripts that they write, and a job on a Slurm of one
machine.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.edited_text import replace_once
from helpers.fake_slurm import sbatch
from helpers.launched import run_file
from helpers.oracle.plans import Case, plan_text
from helpers.programs import make_program
from scalec.compiler.cli import main
from scalec.compiler.reports.job import needs
from scalec.runtime.checkpoint.reader import Saved
from scalec.tools.launch.command import seconds

PLAN = """
model bigram(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 256  hidden = 8 }
  init ~ normal(0.02)
  loss = cross_entropy(embedding(tokens, wte[vocab, hidden]) @ head[hidden -> vocab], labels)
}
train {
  seq = 8  global_batch = 4  microbatch = 2  steps = 5
  optimizer adamw { lr = 1e-2 }
  data text { files = ["text/*.txt"] }
}
"""
LARGE = "mesh { dp = 32 }  shard { batch over dp }  cluster { gpu = h100_sxm  nodes = 4 }"
SMALL = "mesh { dp = 2 }  shard { batch over dp }  cluster { nodes = 2 }"
ELASTIC = "mesh { dp = 8..32 }  shard { batch over dp }  cluster { gpu = h100_sxm  nodes = 4 }"


@pytest.fixture
def folder(working_folder: Path) -> Path:
    """The working directory."""
    (working_folder / "text").mkdir()
    (working_folder / "text/a.txt").write_bytes(bytes(i * 7 % 97 for i in range(900)))
    return working_folder


def _launched(scheduler: str, where: str, *words: str) -> str:
    """The text of the script."""
    plan = PLAN.replace("global_batch = 4", "global_batch = 64") if "32" in where else PLAN
    Path("my plan.scale").write_text(plan + where)
    assert main(["launch", scheduler, "my plan.scale", "-o", "out", "--no-verify", *words]) == 0
    return Path("out", {"slurm": "job.sbatch", "k8s": "job.yaml"}[scheduler]).read_text()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("scheduler", ["slurm", "k8s"])
def test_the_files_that_a_program_reads_stay_beside_it(scheduler: str) -> None:
    """The script of the job is written after them, into the same folder."""
    plan = files("scalec.plans").joinpath("tiny_pipeline.scale").read_text(encoding="utf-8")
    Path("p.scale").write_text(plan.replace('"models/', '"scalec:models/'))
    image = ["--image", "scalec:1"] if scheduler == "k8s" else []
    assert main(["launch", scheduler, "p.scale", "-o", "out", "--no-verify", *image]) == 0
    program = Path("out/train.py").read_text(encoding="utf-8")
    for name in ("schedule.csv", "hf_names.json", "predictions.json"):
        assert name in program
        assert Path("out", name).exists()


@pytest.mark.usefixtures("folder")
def test_scripts(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--sbatch=--partition=gpu",
        "--time",
        "8:00:00",
        "--",
        "--save-every",
        "200",
        "--out",
        "/runs/it's",
    )
    golden("launch/job.sbatch", slurm := _launched("slurm", LARGE, *options))
    assert subprocess.run(["bash", "-n"], input=slurm, text=True, check=False).returncode == 0
    golden("launch/job.yaml", _launched("k8s", LARGE, "--image", "registry.example/scalec:1"))
    golden("launch/needs.json", Path("out/needs.json").read_text())
    assert "to train:\n\n  kubectl apply -f out/job.yaml\n" in capsys.readouterr().out
    golden("launch/elastic.sbatch", _launched("slurm", ELASTIC))


def test_a_job_looks_at_the_shards_of_folders() -> None:
    text = "data text { files = [python_stdlib]  tokenizer = bytes }"
    plan = replace_once(plan_text(Case()), {text: 'data folder { files = ["chat"] }'})
    program = make_program(plan)
    assert needs(program, "tiny")["files"] == ["chat/*.bin"]


@pytest.mark.usefixtures("folder")
def test_a_job_looks_at_the_folder_and_the_data_that_it_trains_on() -> None:
    words = (
        "--data",
        "other/*.txt",
        "more/*.txt",
        "--out",
        "first",
        "--out=last",
        "--resume",
        "auto",
    )
    said = _launched("slurm", SMALL, "--", *words)
    assert json.loads(Path("out/needs.json").read_text())["files"] == ["other/*.txt", "more/*.txt"]
    assert "doctor out/needs.json --out last\n" in said
    assert (
        "out/train.py --data 'other/*.txt' 'more/*.txt' --out first --out=last --resume auto\n"
        in said
    )


def _yaml(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


@pytest.mark.usefixtures("folder")
def test_a_jobset_has_a_pod_for_each_node() -> None:
    job = _yaml(_launched("k8s", LARGE, "--image", "me/scalec"))
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    script = container["command"][-1]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert (
        f"--master-addr={job['metadata']['name']}-{replicated['name']}-0-0.{job['metadata']['name']} "
        in script
    )


@pytest.mark.long
@pytest.mark.usefixtures("folder")
def test_the_job_of_a_jobset_is_one_of_kubernetes() -> None:
    """By the schemas of `pip install kubernetes-validate`, which are too many megabytes for the
    development set-up.
    """
    schemas = pytest.importorskip("kubernetes_validate")
    for where in (LARGE, SMALL):
        job = _yaml(_launched("k8s", where, "--image", "me/scalec"))
        # JobSet's own schema asks for it
        assert all("name" in rule for rule in job["spec"]["failurePolicy"]["rules"])
        (replicated,) = job["spec"]["replicatedJobs"]
        alone = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": job["metadata"],
            **replicated["template"],
        }
        for version in ("1.29", schemas.latest_version()):
            schemas.validate(alone, version, strict=True)


@pytest.mark.parametrize("name", ["x" * 90, "Ünï", "a.b_c", "-9-", "a\nrm b"])
def test_any_plan_has_a_name_that_schedulers_take(name: str, folder: Path) -> None:
    (folder / f"{name}.scale").write_text(PLAN + SMALL)
    for words in (["slurm"], ["k8s", "--image", "me/it"]):
        assert main(["launch", *words, f"./{name}.scale", "-o", "out", "--no-verify"]) == 0
    label = _yaml((folder / "out/job.yaml").read_text())["metadata"]["name"]
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", label)
    assert len(f"{label}-node-0-255-abcde") <= 63
    assert subprocess.run(["bash", "-n", "out/job.sbatch"], check=False).returncode == 0


@pytest.mark.usefixtures("folder")
def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.scale").write_text(PLAN + SMALL)
    assert main(["launch", "k8s", "p.scale"]) == 2
    assert "needs an image with scalec in it: --image IMAGE" in capsys.readouterr().err
    assert main(["launch", "slurm", "p.scale", "--time", "0:02:59"]) == 2
    assert (
        "leaves none to train: Slurm signals 120 s before the end, and up to 60 s earlier"
        in capsys.readouterr().err
    )
    assert main(["launch", "slurm", "p.scale", "--time", "a day"]) == 2
    assert "`--time a day` is not a time of Slurm's" in capsys.readouterr().err
    assert (
        main(["launch", "slurm", "p.scale", "-o", "out", "--no-verify", "--time", "UNLIMITED"]) == 0
    )
    Path("out/job.sbatch").write_text("mine")
    assert main(["launch", "slurm", "p.scale", "-o", "out", "--no-verify"]) == 2
    assert "`out/job.sbatch` was not written by scalec" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("time", "wanted"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:00:05", 3605),
        ("1-2", 93_600),
        ("1-2:30", 95_400),
        ("2-0:0:1", 172_801),
    ]
    + [
        (wrong, None)
        for wrong in ("", "-", "1-", "-1", "1::2", "1:2:3:4", "1-2-3", "1h", "²", "+1")
    ],
)
def test_times_are_those_of_slurm(time: str, wanted: int | None) -> None:
    assert seconds(time) == wanted


STUB = """#!/usr/bin/env python3
import os, signal, sys, time
from pathlib import Path
rank, names = os.environ["RANK"], ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
os.write(1, (" ".join([rank, *(os.environ[name] for name in names), *sys.argv[1:]]) + "\\n").encode())
if sys.argv[1] == "-m":
    sick = Path("sick").read_text() if Path("sick").exists() else "0"
    sys.exit(int(sick) if sick == "1" or os.environ["SLURM_RESTART_COUNT"] == "0" else 0)
planned = Path("statuses").read_text().split()
Path(f"ready{rank}").touch()
status, left = planned[0], planned[1:]
while rank == "0" and len([*Path(".").glob("ready*")]) < 2:
    time.sleep(0.01)
if rank == "0":
    [path.unlink() for path in Path(".").glob("ready*")]
    Path("statuses").write_text(" ".join(left))
    if status == "75":
        Path("due").touch()
while status == "75":
    time.sleep(0.01)
sys.exit(int(status) if rank == "0" else 0)
"""


def _job(folder: Path, statuses: str) -> list[tuple[int, str]]:
    """The starts of a job whose ranks end with these statuses, one after another; 75 when they
    are signalled.
    """
    _launched("slurm", SMALL, "--", "--lr", "0.1")
    (folder / "statuses").write_text(statuses)
    (stub := folder / "python").write_text(STUB)
    stub.chmod(0o755)
    return sbatch(folder / "out/job.sbatch", folder, PYTHON=str(stub))


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", [75, 138])
def test_a_job_saves_is_requeued_and_goes_on(first: int, folder: Path) -> None:
    """One that is signalled before it listens, status 138, has nothing to save."""
    starts = _job(folder, f"{first} 0")
    assert [status for status, _ in starts] == [first, 0], starts
    port = 20000 + os.getpid() % 10000
    for _, told in starts:
        for rank in "01":
            environment = f"{rank} 2 0 1 localhost {port}"
            assert (
                f"{environment} -m scalec.tools.doctor out/needs.json --out"
                " 'runs/my plan'" not in told
            )
            assert (
                f"{environment} -m scalec.tools.doctor out/needs.json --out runs/my plan\n" in told
            )
            assert f"{environment} out/train.py --resume auto --lr 0.1\n" in told
    assert "start 0 of job" in starts[0][1]
    assert "start 1 of job" in starts[1][1]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("statuses", "ended"),
    [("1 0", 0), ("1 1 1 0", 1), ("2 0", 2), ("0 1", 0)],
    ids=["once", "thrice", "cannot", "done"],
)
def test_ranks_that_fail_are_started_anew_some_times(
    statuses: str, ended: int, folder: Path
) -> None:
    ((status, told),) = _job(folder, statuses)
    assert status == ended
    assert told.count("of 3 ended with status 1") == statuses.split("0", maxsplit=1)[0].count("1")


def test_a_job_on_sick_machines_ends_before_it_trains(folder: Path) -> None:
    (folder / "sick").write_text("1")
    ((status, told),) = _job(folder, "0")
    assert status == 1
    assert "train.py" not in told


def test_a_job_whose_time_ends_before_it_trains_is_requeued(folder: Path) -> None:
    (folder / "sick").write_text("138")
    assert [status for status, _ in _job(folder, "0")] == [138, 0]


SLOW = f"""#!{sys.executable}
import os, runpy, sys, time
from pathlib import Path
from scalec.runtime import Loader
prepared = Loader.prepared
def slowly(self, step):
    if os.environ["SLURM_RESTART_COUNT"] == "0":
        Path("due").touch() if step == 3 and os.environ["RANK"] == "0" else time.sleep(0.3)
    return prepared(self, step)
Loader.prepared = slowly
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_a_real_job_saves_is_requeued_and_ends_as_one_that_was_not_disturbed(folder: Path) -> None:
    """With `scalec doctor` and the compiled program; the first start is slow, and is signalled
    in its fourth step.
    """
    _launched("slurm", SMALL, "--", "--steps", "40", "--out", "run")
    (python := folder / "python").write_text(SLOW)
    python.chmod(0o755)
    starts = sbatch(folder / "out/job.sbatch", folder, PYTHON=str(python), OMP_NUM_THREADS="1")
    assert [status for status, _ in starts] == [75, 0], starts
    assert all("fail" not in told and "2 ranks on 1 node" in told for _, told in starts)
    assert "stopped by SIGUSR1: saved run/checkpoints/step-" in starts[0][1]
    assert "resuming from run/checkpoints/step-" in starts[1][1]
    assert (
        run_file(folder / "out", 2, "--steps 40 --out ../whole --data ../text/*.txt")
        == [(0, "")] * 2
    )
    ends = (
        Saved(folder / f"{run}/checkpoints/step-000040").whole(["wte", "head"])
        for run in ("run", "whole")
    )
    assert all(map(torch.equal, *(end.values() for end in ends)))


@pytest.mark.usefixtures("folder")
def test_doctor_looks_at_this_machine_for_a_plan(capfd: pytest.CaptureFixture[str]) -> None:
    """With a process for each rank of a node."""
    Path("p.scale").write_text(PLAN + SMALL.replace("  cluster { nodes = 2 }", ""))
    assert main(["doctor", "p.scale", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert [rank["rank"] for rank in said["ranks"]] == [0, 1]
    assert all(each["rates"]["node"] > 0 for each in said["ranks"])
    assert "1 file of 900 bytes" in next(
        each["said"] for each in said["findings"] if each["about"] == "data"
    )
