"""`recompute = auto(…)`: least time within the memory of a rank, by the account and the prices
of whole plans.
"""

from pathlib import Path

import pytest
from attrs import evolve

from helpers.readback_plans import LLAMA, plan
from scalec.compiler.analysis.memory import account
from scalec.compiler.analysis.recompute_cut import choices, frontier, get_added_time, times
from scalec.compiler.config.settings import Selection
from scalec.compiler.ir import Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.reports.summary import recomputation
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower

PLANS = Path(__file__).parents[2] / "plans"
NAMES = ("mixtral_8x7b", "qwen3_8b")


def _compiled(name: str, recompute: str, until: str = PASS_NAMES[-1]) -> Program:
    text = f'use "{name}.scale" {{ train {{ gathered = save  recompute = {recompute} }} }}\n'
    return compile_plan(Source(str(PLANS / "auto.scale"), text), until)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_more_memory_never_adds_time_and_all_of_it_is_within_the_bound(name: str) -> None:
    most, fewest = (account(_compiled(name, word)).total for word in ("none", "full"))
    bounds = [round(fewest + part * (most - fewest)) for part in (0, 0.15, 0.5, 0.8, 1)]
    found = [_compiled(name, f"auto(memory = {bound}B)") for bound in bounds]
    assert all(account(it).total <= bound for it, bound in zip(found, bounds, strict=True))
    shares = [*map(get_added_time, found)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] == 0
    assert not found[-1].recomputed


def test_no_cut_of_less_time_fits() -> None:
    """Of all that the frontier has; whole plans have too many subsets."""
    nothing = _compiled("mixtral_8x7b", "none")
    known, before = (
        choices(nothing, times(nothing)),
        _compiled("mixtral_8x7b", "none", "overlap_exchanges"),
    )
    found = _compiled("mixtral_8x7b", "auto(memory = 45GiB)")
    chosen = known.cut(frozenset(found.recomputed))
    quicker = [cut for cut in frontier(known) if cut.time < chosen.time]
    assert quicker
    for cut in quicker:
        assert account(lower(evolve(before, recomputed=tuple(cut.names)))).total > 45 << 30


def test_what_is_recomputed_reads_back_and_is_told() -> None:
    found = _compiled("mixtral_8x7b", "auto(memory = 45GiB)")
    assert read_ir(Source("auto.ir", print_ir(found))) == found
    assert all(f"recomputed {name}\n" in print_ir(found) for name in found.recomputed)
    made = [op.kind for op in found.ops].count("silu_mul")
    assert made == 2
    assert "rmsnorm at mixtral.scale:21" in recomputation(found)
    assert " to the computation of a microbatch" in recomputation(found)
    assert (
        recomputation(_compiled("mixtral_8x7b", "auto"))
        == "recomputed: nothing, as a rank has memory for all"
    )
    assert "all of each of layers" in recomputation(
        _compiled("mixtral_8x7b", "auto(memory = 35GiB)")
    )


def test_a_plan_of_which_the_gpu_is_not_known_goes_by_operations() -> None:
    text = plan(LLAMA, "", "", "recompute = auto(memory = 500KiB)")
    found = compile_plan(Source("auto.scale", text))
    assert found.train.recompute == Selection("auto", memory=500 << 10)
    assert found.recomputed
    assert " to the operations of a microbatch" in recomputation(found)


def test_a_bound_that_nothing_reaches_says_how_much_is_needed() -> None:
    with pytest.raises(PlanError) as error:
        _compiled("mixtral_8x7b", "auto(memory = 20GiB)")
    (found,) = error.value.diagnostics
    fewest = account(_compiled("mixtral_8x7b", "full")).total
    assert found.code == "E0419"
    assert (
        f"needs {fewest / 2**30:.1f} GiB whatever is recomputed, and has 20.0 GiB" in found.message
    )


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("auto", "E0419"),
        ("auto(memory = 3)", "E0404"),
        ("auto(9GiB)", "E0404"),
        ("auto(memory = 9GiB)  compile = on", "E0412"),
    ],
)
def test_mistakes(said: str, code: str) -> None:
    with pytest.raises(PlanError) as error:
        compile_plan(Source("auto.scale", plan(LLAMA, "", "", f"recompute = {said}")))
    assert [it.code for it in error.value.diagnostics] == [code]
