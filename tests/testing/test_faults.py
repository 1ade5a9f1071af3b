"""Faults: each strikes at its point, once, and the same for a seed; what it leaves is what such
a fault leaves.
"""

import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.runtime.checkpoint.files import Disk, write_durably
from scalec.runtime.checkpoint.reader import Saved
from scalec.testing.faults import (
    EVENTS,
    LAUNCHER,
    Action,
    Corrupt,
    Event,
    Fault,
    Flip,
    Outcome,
    Point,
    Poison,
    Program,
    Raise,
    Remove,
    Scene,
    Send,
    Slow,
    Truncate,
    disk_full,
    drawn,
    fork,
    kill,
    small_disk,
    stop,
    torchrun,
    until_done,
)

RANKS, STEPS, EVERY = 2, 6, 2
CHECKPOINTS = Path("runs", "tiny", "checkpoints")
POINTS = {
    "start": Point("start"),
    "data": Point("data", 4, 1),
    "step": Point("step", 4, 1),
    "collective": Point("collective", 4, 1, nth=2),
    "prepare": Point("prepare", 4),
    "write": Point("write", 4, 1),
    "sync": Point("sync", 4, 1),
    "publish": Point("publish", 4),
    "remove": Point("remove", 2),  # when the third is there
}


@pytest.fixture
def program(tmp_path: Path, calls_uncompared: None) -> Program:
    """Six steps of a tiny model on two ranks, and three saves."""
    corpus = tmp_path / "corpus.bin"
    corpus.write_bytes(bytes(random.Random(0).choices(range(32), k=4000)))
    folder = write_program(plan_text(Case(dp=RANKS, microbatches=2, clip=1.0)), tmp_path)
    options = f"--device=cpu --steps={STEPS} --save-every={EVERY} --log-every=1 --data={corpus}"
    return Program(folder, RANKS, options)


def _one(program: Program) -> Program:
    """The program on one rank, of the same samples."""
    write_program(plan_text(Case(microbatches=4, clip=1.0)), program.folder)
    return replace(program, ranks=1)


def _after(program: Program, action: Action, at: Point) -> Outcome:
    return fork(program, Fault(at, action)).wait()


@pytest.mark.sample(1)
@pytest.mark.parametrize("event", EVENTS)
def test_a_rank_is_killed_at_each_event(program: Program, event: Event) -> None:
    at = POINTS[event]
    ended = _after(_one(program) if event == "start" else program, kill(), at)
    assert ended.statuses[at.rank] == -signal.SIGKILL
    assert [strike.split(":")[0] for strike in ended.strikes] == [
        f"rank {at.rank} in step {at.step or 0}"
    ]
    saved = sorted(path.name for path in (program.folder / CHECKPOINTS).glob("step-*"))
    if event in ("data", "step", "collective"):  # beside which the save of step 2 may be under way
        assert [name.removesuffix(".tmp") for name in saved] in ([], ["step-000002"])
        return
    assert saved == {
        "start": [],
        "prepare": ["step-000002"],
        "remove": ["step-000002", "step-000004", "step-000006"],
    }.get(event, ["step-000002", "step-000004.tmp"])


@pytest.mark.long
def test_a_fault_strikes_once_over_all_restarts(program: Program) -> None:
    fault = Fault(Point("step", 2), kill(0, 1), times=2)
    ends = until_done(lambda _: fork(program, fault), most=3)
    assert [len(ended.strikes) for ended in ends] == [1, 1, 0]
    assert ends[0].statuses == (-signal.SIGKILL, -signal.SIGKILL)
    with pytest.raises(AssertionError, match="started 2 times, and not done"):
        until_done(lambda _: fork(program, replace(fault, times=3)), most=2)


def _command(process: int) -> bytes:
    """The command line of a process; empty where it has ended, or is about to."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def test_a_launcher_dies_and_its_ranks_are_ended(program: Program) -> None:
    with torchrun(program, Fault(Point("publish", 4), kill(LAUNCHER))) as job:
        ended = job.wait()
    assert ended.statuses == (-signal.SIGKILL,)
    assert len(ended.strikes) == 1
    assert not any(_command(process) for process in job.processes().values())


def test_a_job_that_does_not_end_in_time_is_killed(program: Program) -> None:
    job = fork(program, Fault(Point("step", 2, 1), stop()))
    with pytest.raises(TimeoutError, match=r"processes \[0, 1\] did not end within 1 s"):
        job.wait(1)
    assert not any(_command(process) for process in job.processes().values())


def test_stopped_and_slow_ranks_go_on(program: Program) -> None:
    faults = [Fault(Point("step", 2, 1), stop(0.3)), Fault(Point("step", 3), Slow(0.2), times=2)]
    ended = fork(program, *faults).wait()
    assert ended.succeeded
    assert len(ended.strikes) == 2
    assert ended.seconds >= 0.5


def test_a_save_is_tried_anew_whatever_its_limit(program: Program) -> None:
    program = replace(program, options=f"{program.options} --save-limit=0.1")
    ended = _after(program, disk_full(), Point("write", STEPS))
    assert ended.succeeded, ended.err
    assert "trying again in 1 s" in ended.out[0]


def test_exceptions_and_values_fail_as_such(program: Program) -> None:
    program = _one(program)
    assert "planted" in _after(program, Raise(RuntimeError, ("planted",)), Point("data", 3)).err[0]
    full = _after(program, disk_full(), Point("write", 4))
    assert full.succeeded
    assert (
        "cannot save step 4: runs/tiny/checkpoints/step-000004.tmp/rank-00000.safetensors: No space"
        in full.out[0]
    )
    assert "nan" in _after(program, Poison(), Point("step", 3)).err[0]
    assert _after(program, Send(signal.SIGKILL), Point("step", 3)).statuses == (-signal.SIGKILL,)


def test_weights_that_are_gathered_are_poisoned_where_they_are_kept(program: Program) -> None:
    """Under ZeRO 3, on the rank that has the last of them."""
    write_program(
        plan_text(Case(dp=RANKS, microbatches=2, clip=1.0, state="zero 3 over dp")), program.folder
    )
    ended = _after(program, Poison(), Point("step", 3, RANKS - 1))
    assert "step 3: loss nan" in "".join(ended.err)  # of the rank that is first to see it


def test_a_flipped_bit_is_in_the_state(program: Program) -> None:
    program = replace(_one(program), options=program.options + " --lr=0 --steps=2")
    states = list[torch.Tensor]()
    for faults in ((), (Fault(Point("step", 2), Flip(of="state")),)):
        assert fork(program, *faults).wait().succeeded
        states.append(
            Saved(program.folder / CHECKPOINTS / "step-000002").whole(["head"])["head"].view(-1)
        )
    differs = states[0].view(torch.int64) ^ states[1].view(torch.int64)
    assert differs.tolist() == [*[0] * (len(differs) - 1), 1]


def test_files_change_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scene = Scene(0, {}, {})
    for name in ("a", "b"):
        Path(name).write_bytes(b"0123")
    Corrupt("[ab]").strike(scene)
    assert (Path("a").read_bytes(), Path("b").read_bytes()) == (b"0123", b"01\xcd3")
    Truncate("[ab]", 0.25).strike(scene)
    assert Path("b").read_bytes() == b"0"
    Remove("[ab]").strike(scene)
    assert not Path("b").exists()
    Corrupt("nothing").strike(scene)


def test_seeds_draw_every_event_and_the_same_fault(program: Program) -> None:
    faults = [drawn(seed, 4, range(1, 21), 5, launcher=True) for seed in range(300)]
    assert faults == [drawn(seed, 4, range(1, 21), 5, launcher=True) for seed in range(300)]
    assert {fault.at.event for fault in faults} == {*EVENTS} - {"start"}
    assert Counter(type(fault.do) for fault in faults).keys() == {Send, Slow, Raise}
    assert {fault.at.rank for fault in faults} == {*range(4)}


def test_a_disk_that_is_full_refuses(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 16) as mounted:
        if not mounted:
            pytest.skip("may not mount")
        with pytest.raises(OSError, match="No space left"):
            write_durably(tmp_path / "disk" / "file", [bytes(1 << 17)], Disk())
