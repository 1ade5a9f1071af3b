"""Runs in which a rank stops, sleeps, dies, fails, is slow or is another program: all ranks end, and name it.

Limits are for the ranks that wait; nothing here has to be fast.  What does not end is killed after minutes, and fails.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from helpers.faulty_ranks import Ended, at_beginning, at_call, die, fail, nap, run, sleep, stop
from helpers.forked_ranks import plain_groups
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from scalec.runtime.train.watchdog.limits import Kind

DATA = Case(dp=2)
TENSORS = Case(dp=2, tp=2, sp=True, microbatches=2)
STAGES = Case(pp=2, microbatches=4)
SHARDED = Case(dp=2, state="zero 3 over dp", microbatches=2)
OPTIONS = "--data=corpus.bin --device=cpu --steps=4 --log-every=1 --step-limit=5 --first-step-limit=60 --save-limit=60"
STEP: tuple[Kind, int] = ("step", 3)


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Groups count calls themselves, which torch's wrapper for debugging does not pass on."""
    with plain_groups():
        yield


def _ended(
    case: Case, folder: Path, bad: int, misbehave: Callable[[], object], left: bool = False, options: str = ""
) -> list[Ended]:
    """How the ranks ended; each tells its launcher why in `why<rank>`."""
    _written(case, folder)

    def prepare(rank: int) -> None:
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"why{rank}"
        if rank == bad:
            misbehave()

    return run(folder, case.ranks, f"{OPTIONS} {options}", prepare, bad if left else -1)


def _written(case: Case, folder: Path) -> None:
    harness.written(plan_text(case), folder)
    (folder / "corpus.bin").write_bytes(bytes(i * 7 % 32 for i in range(8000)))


def _blamed(ended: Sequence[Ended], bad: int, *words: str) -> None:
    """All others have ended with status 1, and each has these words."""
    for rank, each in enumerate(ended):
        if rank != bad:
            assert each.status == 1, each.error
            assert all(word in each.error for word in words), each.error


def test_a_stopped_rank(tmp_path: Path) -> None:
    ended = _ended(DATA, tmp_path, 1, partial(at_beginning, STEP, stop), left=True)
    assert ended[1].status is None
    call = "waits for rank 1 in all_reduce of `num_tokens.1` over dp, tiny.scale:1"
    _blamed(ended, 1, "step 3: ", call, "(--step-limit 5)", "rank 1 on ", "its process is stopped")


def test_a_rank_that_sleeps_in_backward(tmp_path: Path) -> None:
    """In its second step, before the 30th reduce-scatter over tp: 9 a microbatch in forward, and in backward."""
    ended = _ended(TENSORS, tmp_path, 3, partial(at_call, "_reduce_scatter_base", 2, 30, sleep))
    _blamed(ended, 3, "step 2: ", "rank 3 on ", "did not come: in step 2 it is at sleep (faulty_ranks.py")
    call = "waits for rank 3 in reduce_scatter of `d_a.4` over tp in backward, layers.0, microbatch 1, tiny.scale:10"
    assert call in ended[2].error
    assert "waits for rank 3 in all_reduce of `loss.2` over dp" in ended[1].error
    assert "waits for rank 2 in all_reduce of `loss.2` over dp" in ended[0].error  # which waits for rank 3
    assert ended[3].status == 1
    assert "step 2: at sleep (faulty_ranks.py" in ended[3].error


def test_a_stopped_stage_of_a_pipeline(tmp_path: Path) -> None:
    ended = _ended(STAGES, tmp_path, 1, partial(at_beginning, STEP, stop), left=True)
    message = "to rank 1 of pp in forward, stage 0, microbatch 1, tiny.scale:"
    _blamed(ended, 1, "step 3: waits for rank 1 in send of `x.1` ", message, "its process is stopped")


@pytest.mark.long
def test_a_stage_that_receives_nothing(tmp_path: Path) -> None:
    ended = _ended(STAGES, tmp_path, 0, partial(at_beginning, STEP, sleep))
    message = "from rank 0 of pp in forward, stage 1, microbatch 1, tiny.scale:"
    _blamed(ended, 0, "waits for rank 0 in receive of `x.1` ", message, "rank 0 on ", "did not come: in step 3")


def test_a_killed_rank(tmp_path: Path) -> None:
    """Found before any limit, by its neighbour or the rank that loses it."""
    unlimited = "--step-limit=86400 --first-step-limit=86400"
    ended = _ended(SHARDED, tmp_path, 1, partial(at_call, "_allgather_base", 2, 7, die), options=unlimited)
    assert ended[1].status == -9
    _blamed(
        ended, 1, "waits for rank 1 in all_gather of `w_layers_", "rank 1 on ", "is gone: its process ended without"
    )


def test_a_failing_rank_is_told_once_and_to_every_launcher(tmp_path: Path) -> None:
    unlimited = "--step-limit=86400 --first-step-limit=86400"
    ended = _ended(TENSORS, tmp_path, 2, partial(at_call, "_allgather_base", 2, 47, fail), options=unlimited)
    assert [each.status for each in ended] == [1] * 4
    assert "ValueError: no such number" in ended[2].error
    assert [each.error for rank, each in enumerate(ended) if rank != 2] == [""] * 3
    for rank in range(4):
        why = (tmp_path / f"why{rank}").read_text()
        assert "rank 2 on " in why
        assert "ValueError: no such number" in why


def test_a_slow_rank_goes_on(tmp_path: Path) -> None:
    ended = _ended(DATA, tmp_path, 1, partial(at_beginning, STEP, nap), options="--step-limit=600")
    assert [each.status for each in ended] == [0, 0], ended
    assert [each.error for each in ended] == ["", ""]


@pytest.mark.long
def test_a_rank_that_does_not_come_to_a_save(tmp_path: Path) -> None:
    ended = _ended(DATA, tmp_path, 1, partial(at_beginning, ("save", 4), sleep), options="--save-limit=5")
    _blamed(ended, 1, "the save after step 4: waits for rank 1 in a meeting of all ranks", "rank 1 on ", "did not come")


@pytest.mark.parametrize("of", ["another order", "a call too many", "a call too few"])
@pytest.mark.sample(1)
def test_a_rank_with_another_program(of: str, tmp_path: Path) -> None:
    """It is told apart by its calls, which are not those of the plan, wherever the ranks wait."""
    _written(TENSORS, tmp_path)
    (tmp_path / "other").mkdir()
    for file in tmp_path.glob("*.*"):
        (tmp_path / "other" / file.name).write_text(_other(of, file.read_text()))
    ended = run(
        tmp_path, 4, f"{OPTIONS} --first-step-limit=5", lambda rank: "other/train.py" if rank == 1 else "train.py"
    )
    assert all(each.status for each in ended)
    told = [each.error for rank, each in enumerate(ended) if rank in (0, 2)]  # rank 3 may be ended by gloo itself
    assert all("rank 1 on " in error and "has left the plan's order in step 1: " in error for error in told), told


def _other(of: str, text: str) -> str:
    """A program with two calls in another order, or with another number of calls."""
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if of == "another order" and line.startswith('    all_reduce_(gradients["matrices"]'):
            lines[at : at + 2] = [lines[at + 1], lines[at]]
            break
        if line.startswith("    loss = all_reduce_(loss, dp)"):
            if of == "a call too many":
                lines.insert(at, "    all_reduce_(loss.clone(), tp)\n")
                break
            if of == "a call too few":
                lines[at] = line.replace("all_reduce_(loss, dp)", "loss")
                break
    return "".join(lines)
