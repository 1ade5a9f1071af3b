"""Whole runs of programs: train, save, resume, on the same mesh and on others; under torchrun,
how runs fail.
"""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.run import get_args_parser

from helpers.forked_ranks import HANGS
from helpers.launched import run_file
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.runtime.checkpoint.reader import Saved
from scalec.runtime.train.options import parse
from scalec.testing.faults import Fault, Point, Program, kill, torchrun

# The same model, optimizer and global batch on three meshes.
MESH = Case(dp=2, tp=2, sp=True, microbatches=2, optimizer="groups", clip=1.0)
ONE = Case(microbatches=4, optimizer="groups", clip=1.0)
FOUR = Case(dp=4, optimizer="groups", clip=1.0)
SHARED = Case(
    dp=2, tp=2, sp=True, microbatches=2, optimizer="groups", clip=1.0, state="zero 1 over dp"
)
SHARED_FOUR = Case(dp=4, optimizer="groups", clip=1.0, state="zero 1 over dp")
STAGED = Case(pp=2, tp=2, sp=True, microbatches=4, optimizer="groups", clip=1.0, model="tied")
STAGED_ONE = Case(microbatches=4, optimizer="groups", clip=1.0, model="tied")
STAGED_V = Case(
    pp=2,
    dp=2,
    microbatches=2,
    optimizer="groups",
    clip=1.0,
    model="tied",
    schedule="zbv",
    state="zero 1 over dp",
)
EXPERTS = Case(dp=2, ep=2, model="biased", experts="ep", optimizer="groups", clip=1.0)
FOLDED = Case(
    dp=4, model="biased", experts="dp", optimizer="groups", clip=1.0, state="zero 2 over dp"
)
EXPERTS_ONE = Case(microbatches=4, model="biased", optimizer="groups", clip=1.0)
EXPERTS_IN_PARTS = Case(
    dp=2,
    tp=2,
    microbatches=2,
    model="biased",
    experts="dp",
    inner=True,
    optimizer="groups",
    clip=1.0,
    state="zero 1 over dp",
)
STEPS, HALF = 6, 3
RUN = Path("runs", "tiny")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A file of bytes below the vocabulary's size."""
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(random.Random(0).choices(range(32), k=4000)))
    return path


def test_runs_resume_bitwise_and_on_other_meshes(tmp_path: Path, corpus: Path) -> None:
    whole = _trained(MESH, tmp_path / "whole", corpus)
    assert [entry["step"] for entry in whole.log] == list(range(1, STEPS + 1))

    resumed = _trained(MESH, tmp_path / "resumed", corpus, resume=whole)
    assert resumed.log == whole.log[HALF:]
    assert resumed.state.keys() == whole.state.keys()
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())

    for case, name in ((ONE, "one"), (FOUR, "four"), (SHARED, "shared")):
        other = _trained(case, tmp_path / name, corpus, resume=whole)
        for got, want in zip(other.log, whole.log[HALF:], strict=True):
            assert got == pytest.approx(want, rel=1e-9)
        assert other.state.keys() == whole.state.keys()
        for key, value in whole.state.items():
            torch.testing.assert_close(other.state[key], value, rtol=1e-9, atol=1e-12)


def test_shared_state_resumes_bitwise_and_under_other_plans(tmp_path: Path, corpus: Path) -> None:
    whole = _trained(SHARED, tmp_path / "whole", corpus)
    resumed = _trained(SHARED, tmp_path / "resumed", corpus, resume=whole)
    assert resumed.log == whole.log[HALF:]
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())
    for case, name in ((ONE, "one"), (SHARED_FOUR, "four")):
        other = _trained(case, tmp_path / name, corpus, resume=whole)
        assert other.state.keys() == whole.state.keys()
        for key, value in whole.state.items():
            torch.testing.assert_close(other.state[key], value, rtol=1e-9, atol=1e-12)


def test_stages_resume_bitwise_and_under_other_plans(tmp_path: Path, corpus: Path) -> None:
    """A tied embedding is on two ranks and is saved once."""
    whole = _trained(STAGED, tmp_path / "whole", corpus)
    resumed = _trained(STAGED, tmp_path / "resumed", corpus, resume=whole)
    assert resumed.log == whole.log[HALF:]
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())
    for case, name in ((STAGED_ONE, "one"), (STAGED_V, "v")):
        other = _trained(case, tmp_path / name, corpus, resume=whole)
        assert other.state.keys() == whole.state.keys()
        for key, value in whole.state.items():
            torch.testing.assert_close(other.state[key], value, rtol=1e-9, atol=1e-12)


def test_experts_resume_bitwise_and_folded_otherwise(tmp_path: Path, corpus: Path) -> None:
    whole = _trained(EXPERTS, tmp_path / "whole", corpus)
    resumed = _trained(EXPERTS, tmp_path / "resumed", corpus, resume=whole)
    assert resumed.log == whole.log[HALF:]
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())
    for case, name in ((FOLDED, "folded"), (EXPERTS_ONE, "one"), (EXPERTS_IN_PARTS, "parts")):
        _assert_goes_on(_trained(case, tmp_path / name, corpus, resume=whole), whole)


@pytest.mark.long
def test_experts_of_which_ranks_had_parts_resume_whole(tmp_path: Path, corpus: Path) -> None:
    """They are stored in three dims there, and in two elsewhere."""
    parts = _trained(EXPERTS_IN_PARTS, tmp_path / "parts", corpus)
    for case, name in ((FOLDED, "folded"), (EXPERTS_IN_PARTS, "resumed")):
        _assert_goes_on(_trained(case, tmp_path / name, corpus, resume=parts), parts)


def _assert_goes_on(other: "_Run", whole: "_Run") -> None:
    """A resumed run has the same steps, in which the order of sums alone differs."""
    for got, want in zip(other.log, whole.log[HALF:], strict=True):
        assert got == pytest.approx(want, rel=1e-12)
    assert other.state.keys() == whole.state.keys()
    for key, value in whole.state.items():
        torch.testing.assert_close(other.state[key].view_as(value), value, rtol=1e-9, atol=1e-12)


class _Run:
    """What a finished run left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / RUN
        lines = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        keys = ("step", "loss", "norm", "lr", "tokens")
        self.log = [{key: line[key] for key in keys} for line in lines if "loss" in line]
        self.state = _state(self.folder / "checkpoints" / f"step-{STEPS:06d}")


def _trained(case: Case, folder: Path, corpus: Path, resume: _Run | None = None) -> _Run:
    """Trains to the last step, from the middle of another run if there is one."""
    write_program(plan_text(case), folder)
    if resume:
        middle = f"checkpoints/step-{HALF:06d}"
        shutil.copytree(resume.folder / middle, folder / RUN / middle)
    options = f"--device=cpu --steps={STEPS} --save-every={HALF} --log-every=1 --data={corpus}"
    ended = run_file(folder, case.ranks, f"{options} --resume" if resume else options)
    assert [status for status, _ in ended] == [0] * case.ranks, ended
    return _Run(folder)


def _state(checkpoint: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors, whole."""
    saved = Saved(checkpoint)
    return saved.whole([*saved.tensors()])


def _start(ranks: int, folder: Path, corpus: Path, *options: str) -> subprocess.Popen[str]:
    """The program in `folder` under torchrun, or alone; there it also leaves its run."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks > 1
        else []
    )
    command = [sys.executable, *launch, "train.py", "--device=cpu", *options, f"--data={corpus}"]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Waits; ends it with all its ranks if it takes longer."""
    try:
        out, err = process.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return subprocess.CompletedProcess[Any](process.args, process.returncode, out, err)


def test_a_wrong_world_size_is_one_line(tmp_path: Path, corpus: Path) -> None:
    done = _finished(_start(1, write_program(plan_text(MESH), tmp_path), corpus))
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert "takes 4 ranks, not 1" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_missing_data_file_is_one_line(tmp_path: Path) -> None:
    """Of both ranks, which agree on it."""
    done = _finished(
        _start(2, write_program(plan_text(Case(dp=2)), tmp_path), tmp_path / "nowhere*")
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: no data: ")
    assert done.stderr.count("error: no data") == 1


def test_torchrun_hands_on_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun abbreviates its own options, and looks for them after the script's name too."""
    with pytest.raises(SystemExit):
        parse(harness.load_case(MESH, tmp_path).PLAN, ["--help"])
    options = set(re.findall(r"(?m)^  (--[a-z-]+)", capsys.readouterr().out))
    assert {"--steps", "--resume"} < options
    for option in options:
        assert get_args_parser().parse_args(["train.py", option]).training_script_args == [option]


@pytest.mark.long  # of a killed rank `test_silence.py` has a shorter test
def test_a_killed_rank_ends_the_job(tmp_path: Path, corpus: Path) -> None:
    case = Case(dp=2)
    write_program(plan_text(case), tmp_path)
    program = Program(tmp_path, case.ranks, f"--device=cpu --steps=1000000 --data={corpus}")
    with torchrun(program, Fault(Point("step", 3, rank=1), kill())) as job:
        assert job.wait().statuses == (1,)
