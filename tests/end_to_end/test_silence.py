"""Runs in which a rank stops, sleeps, dies, fails, is slow or is another program: all ranks end,
and name it.

Limits are for the ranks that wait; nothing here has to be fast.  What does not end is killed after
minutes, and fails.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from time import monotonic

import pytest
from torch.distributed.flight_recorder.components.loader import read_dump

from helpers.forked_ranks import plain_groups
from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.runtime.train.watchdog.call_order import get_planned_calls
from scalec.testing.faults import (
    Action,
    Fault,
    Outcome,
    Point,
    Program,
    Raise,
    Slow,
    fork,
    kill,
    stop,
)

DATA = Case(dp=2)
TENSORS = Case(dp=2, tp=2, sp=True, microbatches=2)
STAGES = Case(pp=2, microbatches=4)
SHARDED = Case(dp=2, state="zero 1 over dp", microbatches=2)
DATA_OPTIONS = "--data=corpus.bin --data-as-is --device=cpu"
OPTIONS = (
    f"{DATA_OPTIONS} --steps=4 --log-every=1 --step-limit=5 --first-step-limit=60 --save-limit=60"
)
UNLIMITED = "--step-limit=86400 --first-step-limit=86400 --save-limit=86400"
SLEEP = Slow(86400)
FAIL = Raise(ValueError, ("no such number",))


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Groups count calls themselves, which torch's wrapper for debugging does not pass on."""
    with plain_groups():
        yield


def _written(case: Case, folder: Path) -> None:
    write_program(plan_text(case), folder)
    (folder / "corpus.bin").write_bytes(bytes(i * 7 % 32 for i in range(8000)))


def _run(case: Case, folder: Path, at: Point, do: Action, options: str = "") -> Outcome:
    """A run with a fault; each rank tells its launcher why in `why<rank>`."""

    def main() -> None:
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"why{os.environ['RANK']}"
        run_path("train.py", run_name="__main__")

    program = Program(folder, case.ranks, f"{OPTIONS} {options}")
    with fork(program, Fault(at, do), main=main) as job:
        ended = job.wait()
    assert len(ended.strikes) == 1
    return ended


def _before(call: str, step: int, rank: int, folder: Path) -> Point:
    """The point before this call of the plan, of which all ranks have the same."""
    calls = [
        *map(str, get_planned_calls(json.loads((folder / "plan.json").read_text()), False, None))
    ]
    return Point("collective", step, rank, calls.index(call))


def _blamed(ended: Outcome, bad: int, *words: str) -> None:
    """All others have ended with status 1, and each has these words."""
    for rank, (status, error) in enumerate(zip(ended.statuses, ended.err, strict=True)):
        if rank != bad:
            assert status == 1, error
            assert all(word in error for word in words), error


def test_a_stopped_rank(tmp_path: Path) -> None:
    _written(DATA, tmp_path)
    ended = _run(DATA, tmp_path, Point("step", 3, rank=1), stop())
    assert ended.statuses[1] == -signal.SIGKILL  # by its neighbour, as it cannot end itself
    call = "waits for rank 1 in all_reduce of `num_tokens.1` over dp, tiny.scale:1"
    said = "torch's record of the last calls: "
    _blamed(
        ended, 1, "step 3: ", call, "(--step-limit 5)", "rank 1 on ", "its process is stopped", said
    )
    names = ended.err[0].partition(said)[2].splitlines()[0].removesuffix("RANK")
    assert read_dump(Path(names).name, f"{names}0")["rank"] == 0, "as torch's own reader has it"


@pytest.mark.long
def test_without_an_option_a_stopped_rank_is_named_within_a_minute(tmp_path: Path) -> None:
    """Where steps are short, and the first ones are over."""
    _written(DATA, tmp_path)
    program = Program(
        tmp_path, DATA.ranks, "--data=corpus.bin --data-as-is --device=cpu --steps=20 --log-every=1"
    )

    def main() -> None:
        run_path("train.py", run_name="__main__")

    with fork(program, Fault(Point("step", 6, rank=1), stop()), main=main) as job:
        began = monotonic()
        ended = job.wait()
    assert monotonic() - began < 60
    _blamed(ended, 1, "step 6: ", "(--step-limit 30)", "rank 1 on ", "its process is stopped")


@pytest.mark.long
def test_a_rank_that_sleeps_in_backward(tmp_path: Path) -> None:
    _written(TENSORS, tmp_path)
    call = "reduce_scatter of `d_a.4` over tp in backward, layers.0, microbatch 1, tiny.scale:10"
    ended = _run(TENSORS, tmp_path, _before(call, 2, 3, tmp_path), SLEEP)
    _blamed(
        ended, 3, "step 2: ", "rank 3 on ", "did not come: in step 2 it is at strike (actions.py"
    )
    assert f"waits for rank 3 in {call}" in ended.err[2]
    assert "waits for rank 3 in all_reduce of `loss.2` over dp" in ended.err[1]
    # which waits for rank 3
    assert "waits for rank 2 in all_reduce of `loss.2` over dp" in ended.err[0]
    assert ended.statuses[3] == 1
    assert "step 2: at strike (actions.py" in ended.err[3]


@pytest.mark.long
@pytest.mark.parametrize("case", [TENSORS, STAGES], ids=["tensors", "stages"])
def test_calls_of_a_sanitized_run_have_names(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its comparisons are calls of the same groups, which are none of the plan's."""
    monkeypatch.setenv("SCALEC_SANITIZE", "1")
    _written(case, tmp_path)
    ended = _run(case, tmp_path, Point("step", 3, rank=1), stop())
    call = (
        "to rank 1 of pp in forward"
        if case.pp > 1
        else "waits for rank 1 in reduce_scatter of `x.5` over tp"
    )
    _blamed(ended, 1, "step 3: ", "rank 1 on ", "its process is stopped")
    assert call in ended.err[0], ended.err[0]
    assert "has left the plan's order" not in "".join(ended.err)


@pytest.mark.long
def test_a_stopped_stage_of_a_pipeline(tmp_path: Path) -> None:
    _written(STAGES, tmp_path)
    ended = _run(STAGES, tmp_path, Point("step", 3, rank=1), stop())
    message = "to rank 1 of pp in forward, stage 0, microbatch 1, tiny.scale:"
    _blamed(
        ended, 1, "step 3: waits for rank 1 in send of `x.1` ", message, "its process is stopped"
    )


@pytest.mark.long
def test_a_stage_that_receives_nothing(tmp_path: Path) -> None:
    _written(STAGES, tmp_path)
    ended = _run(STAGES, tmp_path, Point("step", 3, rank=0), SLEEP)
    message = "from rank 0 of pp in forward, stage 1, microbatch 1, tiny.scale:"
    _blamed(
        ended,
        0,
        "waits for rank 0 in receive of `x.1` ",
        message,
        "rank 0 on ",
        "did not come: in step 3",
    )


def test_a_killed_rank(tmp_path: Path) -> None:
    """Found before any limit, by its neighbour or the rank that loses it."""
    _written(SHARDED, tmp_path)
    ended = _run(SHARDED, tmp_path, Point("collective", 2, rank=1, nth=3), kill(), UNLIMITED)
    assert ended.statuses[1] == -signal.SIGKILL
    _blamed(
        ended,
        1,
        "step 2: waits for rank 1 in ",
        " over dp",
        "rank 1 on ",
        "is gone: its process ended without",
    )


def test_a_failing_rank_is_told_once_and_to_every_launcher(tmp_path: Path) -> None:
    _written(TENSORS, tmp_path)
    ended = _run(TENSORS, tmp_path, Point("collective", 2, rank=2, nth=47), FAIL, UNLIMITED)
    assert ended.statuses == (1, 1, 1, 1)
    assert "ValueError: no such number" in ended.err[2]
    assert ended.err[:2] + ended.err[3:] == ("", "", "")
    for rank in range(4):
        why = (tmp_path / f"why{rank}").read_text()
        assert "rank 2 on " in why
        assert "ValueError: no such number" in why


def test_a_slow_rank_goes_on(tmp_path: Path) -> None:
    _written(DATA, tmp_path)
    ended = _run(DATA, tmp_path, Point("step", 3, rank=1), Slow(1.5), "--step-limit=600")
    assert (ended.statuses, ended.err) == ((0, 0), ("", ""))


@pytest.mark.long
def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """For longer than the limit of a step, as a scheduler suspends one."""
    _written(DATA, tmp_path)
    ended = _run(DATA, tmp_path, Point("step", 3, rank=1), stop(30, 0, 1), "--step-limit=20")
    assert (ended.statuses, ended.err) == ((0, 0), ("", ""))


@pytest.mark.long
def test_a_rank_that_does_not_come_to_a_save(tmp_path: Path) -> None:
    _written(DATA, tmp_path)
    ended = _run(DATA, tmp_path, Point("prepare", 4, rank=1), SLEEP, "--save-limit=5")
    call = "the save after step 4: waits for rank 1 in a meeting of all ranks"
    _blamed(
        ended, 1, call, "(--save-limit 5)", "rank 1 on ", "did not come: in the save after step 4"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("of", ["another order", "a call too many", "a call too few"])
def test_a_rank_with_another_program(of: str, tmp_path: Path) -> None:
    """It is told apart by its calls, which are not those of the plan, wherever the ranks wait.

    Its file is that of the others, or they would not begin; another version of it is in memory.
    """
    _written(TENSORS, tmp_path)

    def main() -> None:
        text = Path("train.py").read_text()
        own = _other(of, text) if os.environ["RANK"] == "1" else text
        exec(compile(own, "train.py", "exec"), {"__name__": "__main__", "__file__": "train.py"})

    with fork(Program(tmp_path, 4, f"{OPTIONS} --first-step-limit=5"), main=main) as job:
        ended = job.wait()
    assert all(ended.statuses)
    for rank in (0, 2):  # rank 3 may be ended by gloo itself
        assert "rank 1 on " in ended.err[rank]
        assert "has left the plan's order in step 1: " in ended.err[rank]


def _other(of: str, text: str) -> str:
    """A program with two calls in another order, or with another number of calls."""
    lines = text.splitlines(keepends=True)
    sums = next(
        at
        for at, line in enumerate(lines)
        if line.startswith('    all_reduce_(gradients["matrices"]')
    )
    loss = next(
        at for at, line in enumerate(lines) if line.startswith("    loss = all_reduce_(loss, dp)")
    )
    match of:
        case "another order":
            lines[sums : sums + 2] = [lines[sums + 1], lines[sums]]
        case "a call too many":
            lines.insert(loss, "    all_reduce_(loss.clone(), tp)\n")
        case _:
            lines[loss] = lines[loss].replace("all_reduce_(loss, dp)", "loss")
    return "".join(lines)
