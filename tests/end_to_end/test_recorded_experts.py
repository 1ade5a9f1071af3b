"""Rows of experts that ranks exchange, as `SCALEC_RECORD=1` records them: the plan's calls, in
which none is lost.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.oracle import harness
from helpers.oracle.plans import Case
from helpers.oracle.recording import recorded
from scalec.compiler.proof.recorded import compare

CASES = (
    Case(
        dp=2,
        ep=2,
        model="biased",
        experts="ep",
        microbatches=2,
        recompute="selective(dispatch, silu)",
        clip=1.0,
    ),
    Case(
        dp=2,
        tp=2,
        sp=True,
        model="sigmoid",
        experts="dp, tp",
        gathered="regather",
        recompute="every(2, layers)",
    ),
    Case(dp=2, tp=2, model="shared", experts="dp", inner=True, recompute="full"),
    Case(
        dp=2, tp=2, sp=True, model="shared", experts="dp, tp", gathered="regather", microbatches=2
    ),
    Case(tp=2, model="two", experts="tp", microbatches=2),
    Case(
        dp=2,
        tp=2,
        sp=True,
        model="capacity",
        experts="dp",
        inner=True,
        bounded=True,
        recompute="selective(dispatch)",
    ),
    Case(
        cp=2, tp=2, sp=True, how="as zigzag", model="capacity", experts="cp, tp", recompute="full"
    ),
    Case(
        dp=2,
        cp=2,
        how="as zigzag via ring",
        model="capacity",
        experts="dp, cp",
        recompute="selective(dispatch)",
    ),
    Case(
        pp=2,
        ep=2,
        model="two",
        experts="ep",
        schedule="zb_h1",
        microbatches=3,
        recompute="selective(dispatch)",
    ),
    Case(
        pp=2,
        ep=2,
        model="biased",
        experts="ep",
        schedule="zbv",
        layers=4,
        microbatches=3,
        recompute="full",
    ),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_record_is_the_plan(case: Case, tmp_path: Path) -> None:
    found = recorded(harness.load_case(case, tmp_path), tmp_path, "--steps 2")
    assert found.equal, found.lines()


# ---- rows that are lost in a record of two ranks

Exchange = dict[str, Any]
"""The line of a call that exchanges rows."""
Change = Callable[[Exchange, Exchange, int], None]
"""Changes an exchange of a rank, given the rank's first."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of a step in which ranks do not send each other as many rows."""
    folder = tmp_path_factory.mktemp("whole")
    case = Case(dp=2, model="two", experts="dp")
    assert recorded(harness.load_case(case, folder), folder, "--steps 1").equal
    return folder / "runs/tiny/recorded"


def _change(folder: Path, rank: int, numbers: range, change: Change) -> None:
    """Changes a rank's exchanges of these numbers."""
    path = folder / f"rank{rank:05}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    exchanges = [line for line in lines if "splits" in line and line["phase"] == "train"]
    for at in numbers:
        change(exchanges[at], exchanges[0], rank)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lose(each: Exchange, first: Exchange, rank: int) -> None:
    """A row fewer stays on its rank."""
    for sizes in each["splits"]:
        sizes[rank] -= 1
    each["shape"][0] -= 1


def _as_first(each: Exchange, first: Exchange, rank: int) -> None:
    each["splits"], each["shape"] = first["splits"], first["shape"]


def _mix_up(each: Exchange, first: Exchange, rank: int) -> None:
    """A row more goes to the other rank, and comes from it."""
    for sizes in each["splits"]:
        sizes[rank] -= 1
        sizes[1 - rank] += 1


LOST = {
    "dropped": (
        (0,),
        range(8),
        _lose,
        "step 1: ranks 0, 1 send 63 rows of 64 choices: `_y.9`, tiny.scale:17",
    ),
    "not sent back": (
        (0, 1),
        range(1, 2),
        _as_first,
        "step 1: rank 0 sends back other rows than came: `",
    ),
    "others in backward": (
        (0, 1),
        range(4, 5),
        _mix_up,
        "step 1: rank 0 has other rows in backward than in forward: `",
    ),
    "not received": ((0,), range(1), _mix_up, "ranks 0, 1 meet with different calls"),
}


@pytest.mark.parametrize("name", LOST)
def test_lost_rows_are_found(name: str, whole: Path, tmp_path: Path) -> None:
    of, numbers, change, says = LOST[name]
    folder = shutil.copytree(whole, tmp_path / "recorded")
    for rank in of:
        _change(folder, rank, numbers, change)
    found = compare(folder)
    assert not found.equal
    assert says in found.lines(), found.lines()
