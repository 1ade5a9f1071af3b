"""Whole runs of a small hand-written program: what is printed, logged and saved, and how runs
end.
"""

import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname

import pytest
import torch
from torch import Tensor, nn

from helpers.bigram import PLAN, build, eval_step, failing_step, signalling_step, train_step
from helpers.forked_ranks import HANGS
from scalec.runtime import (
    Account,
    Batch,
    Expected,
    Metrics,
    Plan,
    Prediction,
    TrainState,
    train,
)
from scalec.runtime.checkpoint import background, reader
from scalec.runtime.checkpoint.reader import Saved
from scalec.runtime.data import corpus
from scalec.runtime.errors import RunError
from scalec.runtime.train import launch, loop, options
from scalec.runtime.train.options import Options
from scalec.runtime.train.run_folder import Lock

ALONE = replace(PLAN, mesh={"dp": 1})


def _diverging_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    return replace(train_step(model, state, batch, lr), norm=torch.tensor(torch.inf))


@dataclass(frozen=True)
class _Ended:
    status: int
    out: str
    err: str


def _program(
    plan: Plan,
    step: Callable[..., Metrics],
    folder: Path,
    environment: dict[str, str],
    options: str,
) -> None:
    """In a forked process: the program as a launcher starts it."""
    for number, stream in enumerate(("out", "err"), start=1):
        os.dup2(
            os.open(
                folder / f"{stream}{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            ),
            number,
        )
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["train.py", *options.split()]
    status = 0
    try:
        train(plan, build, step, eval_step)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(
    folder: Path,
    plan: Plan,
    options: str = "",
    step: Callable[..., Metrics] = train_step,
    world: int | None = None,
) -> list[_Ended]:
    """How each rank ended."""
    world = world or plan.mesh["dp"]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    counts = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    ranks = [
        multiprocessing.get_context("fork").Process(
            target=_program,
            args=(
                plan,
                step,
                folder,
                {**address, **counts, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                options,
            ),
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANGS)
        rank.kill()
        rank.join()
    texts = [
        ((folder / f"out{rank}").read_text(), (folder / f"err{rank}").read_text())
        for rank in range(world)
    ]
    return [
        _Ended(rank.exitcode or 0, out, err) for rank, (out, err) in zip(ranks, texts, strict=True)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with two text files."""
    (tmp_path / "text").mkdir()
    for name, word in (("a", "abcdefgh "), ("b", "acegbdfh ")):
        (tmp_path / "text" / f"{name}.txt").write_text(word * 40)
    return tmp_path


def _records(folder: Path) -> list[dict[str, float]]:
    return [
        json.loads(line) for line in (folder / "runs/bigram/log.jsonl").read_text().splitlines()
    ]


def _weights(folder: Path, step: int) -> Tensor:
    saved = Saved(folder / f"runs/bigram/checkpoints/step-{step:06d}")
    return torch.stack([*saved.whole(["table", "optimizer/exp_avg_sq/table"]).values()])


def test_a_run_says_logs_and_saves_what_it_did(folder: Path) -> None:
    first, second = _run(
        folder, PLAN, "--log-every 5 --eval-every 3 --steps 7 --data text/*.txt --lr 0.1"
    )
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert second.out == ""
    assert "step 5/7  loss " in first.out
    assert "tokens/s" in first.out
    assert (
        "  train on    torchrun --standalone --nproc-per-node=2 train.py --resume --steps 14"
        " --log-every 5 --eval-every 3 --data 'text/*.txt' --lr 0.1\n"
    ) in first.out
    records = _records(folder)
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 5, 7]
    assert [record["step"] for record in records if "validation" in record] == [3, 6, 7]
    losses = [record["loss"] for record in records if "loss" in record]
    assert 5.6 > losses[0] > losses[1] > losses[2] > losses[3] > losses[4]
    assert (folder / "runs/bigram/checkpoints/step-000007").is_dir()


def test_the_log_of_a_run_that_goes_on_has_the_steps_of_one_that_was_never_stopped(
    folder: Path,
) -> None:
    """The first steps are the ones of the run, not the ones since a resume."""
    line = "--resume auto --log-every 7 --save-every 2 --data text/*.txt --steps"
    for last in (2, 6, 9):
        (ended,) = _run(folder, ALONE, f"{line} {last}")
        assert ended.status == 0, ended.err
    assert [record["step"] for record in _records(folder) if "loss" in record] == [1, 2, 3, 6, 7, 9]


def test_a_run_says_what_it_takes_in_memory_once(folder: Path) -> None:
    """Behind its first step, of the account that of its own place along a pipeline's axis."""
    account = Account("cpu", (2**20, 2**21), axis="dp")
    plan = replace(PLAN, predictions=(Prediction(PLAN.mesh, account),))
    first, second = _run(folder, plan, "--log-every 1 --steps 2 --data text/*.txt")
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert first.out.count("memory: the account for cpu says 1.00 MiB") == 1
    assert "memory" not in second.out
    assert [record for record in _records(folder) if "account" in record] == [
        {"step": 1, "account": 2**20, "reserve": 0}
    ]
    (resumed, _) = _run(folder, plan, "--resume --steps 3 --data text/*.txt")
    assert resumed.out.count("memory: ") == 1


def test_a_run_says_what_is_predicted_once_and_where_the_device_is_the_same(folder: Path) -> None:
    """A run that goes on does not repeat it; validation and its steps are told as ever."""
    plan = replace(
        ALONE, expected=Expected("cpu", seconds=1e3, error=0.1, flops_per_token=5, peak_flops=1e9)
    )
    options = "--log-every 1 --eval-every 2 --data text/*.txt"
    (first,) = _run(folder, plan, f"{options} --steps 2")
    assert first.out.count("predicted on cpu: 1000.00 s a step, ") == 1
    assert first.out.count("(MFU ") == 2
    (resumed,) = _run(folder, plan, f"{options} --resume --steps 4")
    assert "predicted on" not in resumed.out
    assert "slow" not in first.out + resumed.out
    records = [record for record in _records(folder) if "loss" in record]
    assert ["mfu" in record for record in records] == [True] * 4
    elsewhere = replace(
        plan,
        expected=Expected("h100_sxm", seconds=1e-9, error=0.1, flops_per_token=5, peak_flops=1e9),
    )
    (other,) = _run(folder, elsewhere, f"{options} --steps 3")
    assert not any(word in other.out for word in ("predicted", "MFU", "slow"))


def test_one_line_starts_goes_on_and_has_nothing_more_to_do(folder: Path) -> None:
    line = "--resume auto --save-every 2 --log-every 1 --data text/*.txt --steps"
    (begun,) = _run(folder, ALONE, f"{line} 3")
    assert "resuming" not in begun.out
    shutil.rmtree(folder / "runs/bigram/checkpoints/step-000003")
    (gone_on,) = _run(folder, ALONE, f"{line} 5")
    assert "train on    python train.py --resume auto --steps 10 --save-every 2 " in gone_on.out
    assert "resuming from runs/bigram/checkpoints/step-000002" in gone_on.out
    assert [record["step"] for record in _records(folder) if "loss" in record] == [1, 2, 3, 4, 5]
    repeated = (folder / "runs/bigram/log.repeated.jsonl").read_text().splitlines()
    assert {json.loads(each)["step"] for each in repeated} == {3}
    before = _weights(folder, 5)
    (done,) = _run(folder, ALONE, f"{line} 5")
    assert (done.status, done.out) == (
        0,
        "runs/bigram/checkpoints/step-000005 has finished its 5 steps already: there is"
        " nothing to do\n",
    )
    assert torch.equal(before, _weights(folder, 5))


def test_a_signal_to_one_rank_saves_all_and_the_same_line_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    line = (
        "--resume auto --save-every 1000 --steps 4000 --log-every 1000 --eval-every 4000"
        " --data text/*.txt"
    )
    stopped = _run(folder, PLAN, line, step=signalling_step)
    assert [each.status for each in stopped] == [75, 75]
    (made,) = (folder / "runs/bigram/checkpoints").iterdir()
    step = int(made.name.removeprefix("step-"))
    # the step in which the signal came has begun, and each rank promises one more
    assert 1 < step < 4000
    assert (
        f"\nstopped by SIGUSR1: saved runs/bigram/checkpoints/{made.name}\n  to go on    "
        in stopped[0].out
    )
    further = line.replace("4000", str(step + 2))
    assert [each.status for each in _run(folder, PLAN, further)] == [0, 0]
    shutil.copytree(folder / "text", tmp_path / "other/text")
    _run(tmp_path / "other", PLAN, further)
    assert torch.equal(_weights(folder, step + 2), _weights(tmp_path / "other", step + 2))


def test_a_damaged_checkpoint_is_passed_over_and_kept_under_another_name(folder: Path) -> None:
    line = "--resume auto --save-every 1 --keep 3 --log-every 1 --data text/*.txt --steps"
    _run(folder, PLAN, f"{line} 3")
    saved = folder / "runs/bigram/checkpoints"
    before = _weights(folder, 3)
    (saved / "step-000003" / "rank-00000.safetensors").write_bytes(b"nothing")
    first, second = _run(folder, PLAN, f"{line} 4")
    assert (first.status, second.status) == (0, 0), first.err + second.err
    damaged = "runs/bigram/checkpoints/step-000003"
    assert f"{damaged} is damaged: {damaged}/rank-00000.safetensors has 7 bytes, but " in first.out
    assert f"{damaged} is not used: it is now step-000003.aside-1\n" in first.out
    assert "resuming from runs/bigram/checkpoints/step-000002" in first.out
    assert torch.equal(before, _weights(folder, 3))
    assert {path.name for path in saved.iterdir()} == {
        "step-000003.aside-1",
        *(f"step-00000{n}" for n in (2, 3, 4)),
    }


@pytest.mark.long
def test_a_run_goes_on_without_a_folder_for_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last save fails, and so does the run, which has trained to the end and says so."""
    monkeypatch.setattr(background, "PAUSES", (0.0, 0.0))
    (folder / "runs/bigram").mkdir(parents=True)
    line = "--save-every 1 --log-every 1 --data text/*.txt --steps 2"
    monkeypatch.setattr(Path, "mkdir", _no_checkpoints(Path.mkdir))
    first, second = _run(folder, PLAN, line)
    assert (first.status, second.status) == (1, 1)
    assert "step 2/2  loss" in first.out
    assert (
        first.out.count("cannot save step 1: rank 0: Permission denied; trying again in 0 s\n") == 2
    )
    assert (
        "cannot save step 2: rank 0: Permission denied; given up until the next save is due\n"
        in first.out
    )
    assert first.err + second.err == "error: the last save has failed, and there is no checkpoint\n"


def _no_checkpoints(mkdir: Callable[..., None]) -> Callable[..., None]:
    def refusing(path: Path, *args: object, **options: object) -> None:
        if path.suffix == ".tmp":
            raise OSError(13, "Permission denied")
        mkdir(path, *args, **options)

    return refusing


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    assert _run(folder, ALONE, "--save-every 2")[0].status == 0
    whole = _weights(folder, 4)
    # as if killed between 2 and 4
    (folder / "runs/bigram/checkpoints/step-000004").rename(folder / "kept")
    (resumed,) = _run(folder, ALONE, "--resume")
    assert "resuming from runs/bigram/checkpoints/step-000002" in resumed.out
    assert torch.equal(_weights(folder, 4), whole)


@pytest.mark.long
def test_a_new_run_sets_the_earlier_one_aside(folder: Path) -> None:
    _run(folder, ALONE)
    _run(folder, ALONE, "--steps 2")
    run = folder / "runs/bigram"
    assert (run / "earlier-1/checkpoints/step-000004").is_dir()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("plan", "options", "line"),
    [
        (
            ALONE,
            "",
            "the plan's mesh, dp 1, takes 1 rank, not 2; start it with: python train.py",
        ),
        (
            PLAN,
            "--data a/*.txt",
            "no data: `a/*.txt` matches no file that holds anything, looked for in CWD",
        ),
        (
            PLAN,
            "--data /nothing/*.txt",
            "no data: `/nothing/*.txt` matches no file that holds anything",
        ),
        (
            PLAN,
            "--resume",
            "nothing to resume: no checkpoint in runs/bigram/checkpoints; --resume auto begins"
            " where there is none",
        ),
        (
            replace(PLAN, seq=999),
            "",
            "too little data: 360 tokens in 1 file are less than a window of 1000",
        ),
        (
            replace(PLAN, mesh={}),
            "",
            "a plan without a mesh takes 1 rank, not 2; start it with: python train.py",
        ),
        (
            replace(PLAN, global_batch=42),
            "",
            "too little data: 360 tokens make 40 sequences of 9, fewer than the 42 of a global"
            " batch, so that a step"
            " would see some twice",
        ),
    ],
)
def test_what_cannot_start_says_why_in_one_line_on_rank_0(
    folder: Path, plan: Plan, options: str, line: str
) -> None:
    first, second = _run(folder, plan, options, world=2)
    assert (first.status, second.status) == (2, 2)
    assert first.err == f"error: {line.replace('CWD', str(folder))}\n"
    assert second.err == second.out == first.out == ""


OUTPUTS: dict[str, tuple[str, dict[str, str]]] = {
    "runs/bigram/checkpoints": ("--resume auto", {}),
    "runs/bigram/log.jsonl": ("", {}),
    "runs/bigram/log.repeated.jsonl": ("", {}),
    "runs/bigram/tensorboard": ("--log-to tensorboard", {}),
    "runs/bigram/recorded": ("", {"SCALEC_RECORD": "1"}),
    "profiled": ("", {"SCALEC_PROFILE": "profiled", "SCALEC_PROFILE_STEPS": "1-1"}),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_cannot_be_written_is_found_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """A link to nowhere, which no run sets aside; one below a folder that is not there cannot
    be opened either.
    """
    options, environment = OUTPUTS[output]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (folder / output).parent.mkdir(parents=True, exist_ok=True)
    (folder / output).symlink_to("/nowhere/below")
    first, second = _run(folder, PLAN, f"{options} --save-every 1")
    assert (first.status, second.status) == (2, 2)
    assert first.err.startswith(f"error: cannot write to {output}: ")
    assert len(first.err.splitlines()) == 1
    assert first.out == second.out == second.err == ""


def test_a_plain_file_in_the_place_of_an_output_is_found_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALEC_PROFILE", "taken")
    monkeypatch.setenv("SCALEC_PROFILE_STEPS", "1-1")
    (folder / "taken").write_text("")
    (ended,) = _run(folder, ALONE)
    assert (ended.status, ended.err) == (2, "error: cannot write to taken: it is a file\n")


def test_outputs_are_tried_without_a_trace(folder: Path) -> None:
    (ended,) = _run(folder, ALONE, "--log-to tensorboard", step=failing_alone)
    assert ended.status == 1
    assert {path.name for path in (folder / "runs/bigram").iterdir()} == {"claim", "lock"}


def failing_alone(*_: object) -> Metrics:
    """A step that fails before anything is logged or saved."""
    raise RunError("no step")


def test_a_full_disk_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    (ended,) = _run(folder, ALONE)
    assert (ended.status, ended.err) == (
        2,
        "error: cannot write to runs/bigram: No space left on device\n",
    )


def test_the_last_words_about_a_loss_are_advice(folder: Path) -> None:
    """Without `locate` there is no value to name: the setting is, and not the number of the
    step.
    """

    def held_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
        nan = torch.tensor(torch.nan)
        state.update(lr, skip=torch.tensor(False), finite=nan.isfinite(), scale=nan)
        return Metrics(loss=nan, norm=nan, tokens=torch.tensor(32))

    (ended,) = _run(folder, ALONE, step=held_step)
    advice = (
        "try a lower --lr; `watch { locate = on }` in the plan names the first value that is"
        " not finite"
    )
    assert ended.err == (
        "error: step 1: loss nan, gradient norm nan; no parameter has been updated by it;"
        f" {advice}\n"
    )


def test_a_rank_that_fails_ends_the_job(folder: Path) -> None:
    first, second = _run(folder, PLAN, step=failing_step)
    assert first.status == second.status == 1
    assert second.err.startswith(f"rank 1 on {gethostname()} failed\nTraceback")
    # in its traceback's last frame and its last line
    assert second.err.count("a rank has a bad day") == 2
    assert "Traceback" not in first.err  # it only lost its peer


def test_a_loss_or_norm_that_is_not_finite_stops_the_run(folder: Path) -> None:
    (ended,) = _run(folder, ALONE, "--log-every 1", step=_diverging_step)
    assert ended.status == 1
    assert ended.err.startswith("error: step 1: loss 5.")
    assert "norm inf" in ended.err
    assert not (folder / "runs/bigram/checkpoints").exists()


# ---- what a run says of what it does not do


def _unlabelled(plan: Plan) -> Plan:
    """Each token ends a document, so that none has a label."""
    return replace(plan, data=replace(plan.data, separator=ord("a")))


@pytest.mark.long
def test_a_run_says_where_it_moved_the_earlier_one(folder: Path) -> None:
    (first,) = _run(folder, ALONE)
    (second,) = _run(folder, ALONE, "--steps 2")
    assert "moved" not in first.out
    said = (
        "moved an earlier run (log.jsonl, checkpoints) from runs/bigram to runs/bigram/earlier-1\n"
    )
    assert second.out.startswith(said)


@pytest.mark.long
def test_what_an_earlier_run_recorded_is_moved_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALEC_RECORD", "1")
    _run(folder, PLAN)
    monkeypatch.delenv("SCALEC_RECORD")
    _run(folder, ALONE)
    run = folder / "runs/bigram"
    assert len([*(run / "earlier-1/recorded").iterdir()]) == 2
    assert not (run / "recorded").exists()


@pytest.mark.parametrize("name", ["SCALEC_RECORD", "SCALEC_SANITIZE"])
def test_an_unknown_value_of_a_variable_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "yes")
    first, second = _run(folder, PLAN)
    assert (first.status, second.status) == (2, 2)
    assert first.err == f"error: {name} is `yes`: write 1, or 0 for a run without\n"
    assert second.err == ""


@pytest.mark.long
def test_an_unknown_variable_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEC_RECROD", "1")
    monkeypatch.setenv("SCALEC_DUMP", "all")  # the compiler's
    first, second = _run(folder, PLAN)
    assert first.err == "warning: there is no SCALEC_RECROD: did you mean SCALEC_RECORD?\n"
    assert (first.status, second.err) == (0, "")


def test_steps_without_labels_are_said_once_and_have_no_loss(folder: Path) -> None:
    for path in (folder / "text").iterdir():
        path.write_text("a" * 360)
    (ended,) = _run(folder, _unlabelled(ALONE), "--log-every 2 --eval-every 4")
    note = (
        "note: in 1 of 1 steps so far no label counts: they update nothing, and the learning"
        " rate goes on\n"
    )
    assert ended.out.count("note: ") == ended.out.count(note) == 1
    assert "step 4/4  no label counts  lr " in ended.out
    assert "step 4/4  validation: no label counts\n" in ended.out
    assert [record.keys() & {"loss", "norm", "validation"} for record in _records(folder)] == [
        set()
    ] * 4
    assert "NaN" not in (folder / "runs/bigram/log.jsonl").read_text()


def test_a_step_without_labels_is_counted_though_it_is_not_logged(folder: Path) -> None:
    def fifth_is_empty(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
        metrics = train_step(model, state, batch, lr)
        steps.append(0)
        return (
            replace(metrics, tokens=torch.zeros_like(metrics.tokens))
            if len(steps) == 5
            else metrics
        )

    steps: list[int] = []
    (ended,) = _run(folder, ALONE, "--log-every 8 --steps 8", fifth_is_empty)
    assert "note: in 1 of 8 steps so far no label counts" in ended.out


@pytest.mark.long
def test_held_out_data_that_is_less_than_a_batch_is_said(folder: Path) -> None:
    for path in (folder / "text").iterdir():
        path.write_text("a" * 27)
    (ended,) = _run(folder, replace(ALONE, global_batch=3))
    assert "validation" not in ended.out.splitlines()[0]
    (folder / "text/b.txt").write_text("a" * 360)  # a.txt is held out
    (ended,) = _run(folder, ALONE)
    said = "27 tokens make 3 sequences of 9, fewer than the 4 of a global batch"
    assert f"validation sees some sequences twice: {said}\n" in ended.out


def test_a_part_of_a_single_file_is_validated_on_and_a_resumed_run_goes_on_bitwise(
    folder: Path,
) -> None:
    line = "--data text/a.txt --eval-every 2 --save-every 2"
    (ended,) = _run(folder, ALONE, line)
    assert (
        "validation: the last 20 sequences of text/a.txt, of 40; training never sees them\n"
        in ended.out
    )
    assert "step 2/4  validation loss " in ended.out
    whole = _weights(folder, 4)
    (folder / "runs/bigram/checkpoints/step-000004").rename(folder / "kept")
    (resumed,) = _run(folder, ALONE, f"{line} --resume")
    assert (resumed.status, torch.equal(_weights(folder, 4), whole)) == (0, True)


def test_a_run_that_held_out_nothing_of_its_file_is_another(folder: Path) -> None:
    whole = replace(ALONE, data=replace(ALONE.data, holdout=0.0))
    line = "--data text/a.txt --eval-every 2 --steps 2"
    (ended,) = _run(folder, whole, line)
    assert "warning: --eval-every has no effect: no data is held out for validation" in ended.out
    (refused,) = _run(folder, ALONE, "--data text/a.txt --resume")
    assert refused.status == 2
    assert "the first 20 sequences: the same numbers are other samples" in refused.err


def test_a_file_of_another_format_and_an_id_beyond_the_vocabulary_end_a_run_before_its_first_step(
    folder: Path,
) -> None:
    (folder / "text/c.txt").write_text('{"text": "a"}\n{"text": "b"}\n' * 20)
    first, second = _run(folder, PLAN)
    assert (first.status, second.status, second.err) == (2, 2, "")
    assert first.err.startswith("error: text/c.txt is JSON lines, not plain text\n")
    (ended,) = _run(folder, ALONE, "--data-as-is")
    assert ended.status == 0
    (folder / "text/c.txt").write_text("a" * 300 + "z")
    first, second = _run(folder, replace(PLAN, vocab=120))
    assert (first.status, second.status, second.err) == (2, 2, "")
    assert first.err.startswith(
        "error: text/c.txt: token 300, at byte 300, has token id 122, and the plan's vocab is"
    )


# ---- going on with a run


def _saved(folder: Path, plan: Plan = ALONE) -> Path:
    """A checkpoint after two steps."""
    assert _run(folder, plan, "--steps 2")[0].status == 0
    return folder / "runs/bigram/checkpoints/step-000002"


SKIPPED = "so some are skipped and others seen twice"
OTHERS: dict[str, tuple[Plan, str, str]] = {
    "seed": (ALONE, "--seed 7", f"seed was 0, now 7: samples come in another order, {SKIPPED}"),
    "larger batch": (
        replace(ALONE, global_batch=8),
        "",
        "global_batch was 4, now 8: step 3 begins with sample 16, not 8: 8 are skipped",
    ),
    "smaller batch": (
        replace(ALONE, global_batch=2),
        "",
        "global_batch was 4, now 2: step 3 begins with sample 4, not 8: 4 are seen twice",
    ),
    "sequences": (
        replace(ALONE, seq=4),
        "",
        f"seq was 8, now 4: the data is cut into other samples, {SKIPPED}",
    ),
    "separator": (_unlabelled(ALONE), "", "separator was None, now 97: documents end elsewhere"),
    "model": (
        replace(ALONE, model="b"),
        "",
        "model was a, now b: the weights were trained to compute something else",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_does_not_go_on_with_another_unless_it_is_told_to(folder: Path, name: str) -> None:
    plan, options, line = OTHERS[name]
    path = _saved(folder, replace(ALONE, model="a")).relative_to(folder)
    (refused,) = _run(folder, plan, f"--resume {options}")
    assert refused.status == 2
    told = (
        "this run would not go on with that one; if it is to, --resume-anyway in place of --resume"
    )
    anew = "without either, or by `scalec run --anew`, it begins, and moves that run aside"
    assert refused.err == f"error: {path} is of another run\n  {line}\n  {told}\n  {anew}\n"
    (ended,) = _run(folder, plan, f"--resume-anyway {options}")
    assert ended.status == 0
    said = ended.out[: ended.out.index(f"resuming from {path}\n")]
    assert said.startswith(f"{line}\n")
    assert "--resume-anyway" not in ended.out
    (further,) = _run(folder, plan, f"--resume --steps 6 {options}")
    assert further.status == 0, "its own checkpoints are of this run"


@pytest.mark.long
def test_other_data_is_another_run_wherever_it_lies(folder: Path) -> None:
    _saved(folder)
    (folder / "text").rename(folder / "elsewhere")
    (ended,) = _run(folder, ALONE, "--resume --steps 3 --data elsewhere/*.txt")
    assert ended.status == 0
    for path in (folder / "elsewhere").iterdir():
        path.write_text(path.read_text()[:-1] + "x")
    (ended,) = _run(folder, ALONE, "--resume --data elsewhere/*.txt")
    assert ended.status == 2
    assert "  data was 1 file of 360 bytes, " in ended.err
    assert f": the same numbers are other samples, {SKIPPED}\n" in ended.err


def test_a_run_goes_on_with_another_mesh_microbatch_learning_rate_and_length(folder: Path) -> None:
    _saved(folder)
    ended = _run(
        folder, replace(PLAN, microbatches=2), "--resume --steps 5 --lr 0.01 --save-every 1"
    )
    assert [each.status for each in ended] == [0, 0], ended[0].err
    told = "learning rate: lr was 0.1, now 0.01, steps was 2, now 5; step 3 takes 1.00e-02\n"
    assert ended[0].out.startswith(told)
    shutil.rmtree(folder / "runs/bigram/checkpoints/step-000005")
    alike, _ = _run(folder, PLAN, "--resume --steps 5 --lr 0.01")
    assert (alike.status, "learning rate: " in alike.out) == (0, False)


@pytest.mark.long
def test_a_second_run_in_a_folder_changes_nothing_there(folder: Path) -> None:
    path = _saved(folder, ALONE)
    held = Lock(folder / "runs/bigram", "")
    before = {
        file: file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.parent.name != "text"
    }
    (second,) = _run(folder, ALONE)
    assert second.status == 2
    assert second.err.startswith("error: another run has the folder runs/bigram: process ")
    for file, content in before.items():
        assert file.name in ("out0", "err0") or file.read_bytes() == content
    assert path.exists()
    del held
    (third,) = _run(folder, ALONE)
    assert third.status == 0


def test_ranks_that_see_other_files_refuse_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on nodes whose folders are not the same."""
    for name in ("0", "1"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(name * 360)

    def of_this_node(_: object) -> list[str]:
        os.environ["LOCAL_RANK"] = "0"  # in a forked process
        return [f"{os.environ['RANK']}/a.txt"]

    monkeypatch.setattr(corpus, "find_files", of_this_node)
    first, second = _run(folder, PLAN)
    assert (first.status, second.status) == (2, 2)
    error, data, help = first.err.splitlines()
    assert (error, help) == ("error: the ranks are not alike", "  do all nodes see the same files?")
    known = r"1 file of 360 bytes, \w+, the first 20 sequences"
    assert re.fullmatch(f"  rank 0 has data {known}, rank 1 has {known}", data)
    assert second.err == ""


def test_ranks_that_read_another_index_refuse_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node that sees an older copy of the checkpoint's folder."""
    assert _run(folder, PLAN, "--steps 2")[0].status == 0
    usual = reader._index_of

    def of_this_node(path: Path) -> object:
        index, digest = usual(path)
        return index, digest if os.environ["RANK"] == "0" else "0" * len(digest)

    monkeypatch.setattr(reader, "_index_of", of_this_node)
    first, second = _run(folder, PLAN, "--steps 4 --resume")
    assert (first.status, second.status) == (2, 2)
    _, checkpoint, _ = first.err.splitlines()
    path = r"runs/bigram/checkpoints/step-000002"
    assert re.fullmatch(
        rf"  rank 0 has checkpoint {path} of index \w+, rank 1 has {path} of index 0+", checkpoint
    )
    assert second.err == ""


def test_ranks_with_other_options_refuse_before_they_make_groups(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlike(plan: Plan) -> Options:
        mine = [] if os.environ["RANK"] == "0" else ["--seed", "1", "--lr", "0.2"]
        return options.parse(plan, ["--device", "cpu", *mine])

    monkeypatch.setattr(loop, "parse", unlike)
    monkeypatch.setattr(launch, "Mesh", None)
    first, second = _run(folder, PLAN)
    assert (first.status, second.status) == (2, 2)
    lines = ["rank 0 has --lr 0.1, rank 1 has 0.2", "rank 0 has --seed 0, rank 1 has 1"]
    help = "start all with the same files, options and versions"
    assert first.err.splitlines() == [
        "error: the ranks are not alike",
        *(f"  {each}" for each in (*lines, help)),
    ]


def test_what_one_rank_cannot_read_ends_all_with_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        corpus, "find_files", lambda _: [f"text/{'ab'[int(os.environ['RANK'])]}.txt"]
    )
    (folder / "text/b.txt").write_text("a")
    first, second = _run(folder, PLAN)
    assert (first.status, second.status) == (2, 2)
    assert first.err == "error: too little data: 1 token in 1 file are less than a window of 9\n"
    assert second.err == ""
