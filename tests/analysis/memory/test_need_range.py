"""The range of what a rank needs: its ends by hand, its verdict, and how reports and warnings
say it.
"""

from pathlib import Path

import pytest

from analysis.memory.test_account import PLAN
from helpers.programs import make_program
from scalec.compiler.analysis.memory import Account, account, at_loads, need_range
from scalec.compiler.analysis.memory.reserve import communicators
from scalec.compiler.cli import main
from scalec.compiler.config.gpus import GIB, GPUS, MIB
from scalec.compiler.ir import Program
from scalec.compiler.reports.explain import memory
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[3] / "plans"


def ends(of: Program, it: Account) -> tuple[int, int]:
    """The range of an account."""
    found = need_range(of, it)
    return found.low, found.high


def test_the_ends_are_those_of_tensors_context_and_channels() -> None:
    """3% less and 6% more tensors; half and twice the context; 12 to 32 of 24 channels for each
    of two groups.
    """
    compiled = make_program(PLAN)
    it = account(compiled)
    groups = communicators(compiled)
    assert groups == 2
    low, high = ends(compiled, it)
    less = 0.03 * it.total + 256 * MIB + groups * 12 * 12 * MIB
    more = 0.06 * it.total + 512 * MIB + groups * 8 * 12 * MIB
    assert (it.needs - low, high - it.needs) == pytest.approx((less, more), abs=4)


def test_a_reserve_that_the_plan_says_is_known() -> None:
    compiled = make_program(PLAN.replace("gpu = h100_sxm", "gpu = h100_sxm  reserve = 5GiB"))
    it = account(compiled)
    low, high = ends(compiled, it)
    assert (it.needs - low, high - it.needs) == pytest.approx(
        (0.03 * it.total, 0.06 * it.total), abs=4
    )


def test_on_the_cpu_it_is_one_number() -> None:
    compiled = make_program(PLAN.replace("gpu = h100_sxm", ""))
    it = account(compiled)
    assert ends(compiled, it) == (it.needs, it.needs)
    assert "the total may be" not in memory(compiled)


def test_experts_may_get_equal_loads() -> None:
    compiled = compile_plan(load(PLANS / "qwen3_30b_a3b.scale"))
    it = account(compiled)
    balanced = next(
        max(each.needs for each in of)
        for load_, of in at_loads(compiled)
        if load_.name == "balanced"
    )
    reason = next(
        each for each in need_range(compiled, it).reasons if each.what.startswith("rows of experts")
    )
    assert (reason.less, reason.more) == (it.needs - balanced, 0)
    assert reason.less > 0


@pytest.mark.parametrize("name", GPUS)
def test_the_reserve_is_between_its_ends(name: str) -> None:
    found = GPUS[name]
    low, high = found.reserve_range(3)
    assert low < found.reserve(3) < high


def sized(room: float) -> str:
    """The plan on a GPU of as many GiB."""
    return PLAN.replace("gpu = h100_sxm", f"gpu = h100_sxm  memory = {round(room * GIB)}B")


@pytest.mark.parametrize(
    ("place", "verdict", "warned"),
    [
        ("above", "fits", ""),
        ("over", "may not fit", ""),
        ("under", "may not fit", "may not fit"),
        ("below", "does not fit", "does not fit"),
    ],
)
def test_the_verdict_goes_by_the_range(
    place: str, verdict: str, warned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU with more than all of it, than the likely value, than the lower end, and with less."""
    it = account(make_program(PLAN))
    low, high = ends(make_program(PLAN), it)
    rooms = {
        "above": high + MIB,
        "over": it.needs + MIB,
        "under": it.needs - MIB,
        "below": low - MIB,
    }
    path = tmp_path / "tiny.scale"
    path.write_text(sized(rooms[place] / GIB))
    assert main(("explain", "memory", str(path))) == 0
    said = capsys.readouterr().out
    assert f"\n{verdict}: needs" in said
    assert ("GiB to " in said.split("\n")[2]) == (verdict == "may not fit")
    assert main(("check", str(path))) == 0
    told = capsys.readouterr().err
    assert (f"warning[W0901]: {warned}: needs" in told) == bool(warned)
    assert ("W0901" in told) == bool(warned)
    assert main(("check", "--must-fit", str(path))) == (1 if place in ("under", "below") else 0)
