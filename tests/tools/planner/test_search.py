"""The search of plans: what it proposes is the best there is, compiles, and keeps to what is
asked.
"""

import random
from collections.abc import Mapping
from functools import cache, partial
from math import inf
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from scalec.compiler.analysis.hardware import find_shipped_gpu
from scalec.compiler.analysis.memory import account, need_range
from scalec.compiler.config.gpus import GIB
from scalec.compiler.frontend import resolve
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, make_variant
from scalec.tools.planner import find_plans
from scalec.tools.planner.cells import cell_columns
from scalec.tools.planner.choice import Choice
from scalec.tools.planner.estimate import estimate
from scalec.tools.planner.exact import Priced, Unpriced, _to_priced, price
from scalec.tools.planner.facts import Facts, Goal
from scalec.tools.planner.plan_text import ModelFile, bare_plan, make_plan_variant, plan
from scalec.tools.planner.report import Planned, print_plans
from scalec.tools.planner.search import SearchResult, search
from scalec.tools.planner.space import Space, divisors, space
from scalec.tools.planner.two_processes import in_two

PLANS = Path(__file__).parents[3] / "plans"

CELLS = {
    "8B on 64": ("llama3_8b.scale", 64, 256, 8192),
    "70B on 512": ("llama3_70b.scale", 512, 512, 8192),
    "experts": ("models/mixtral.scale", 64, 256, 4096),
}


def goal_of(gpus: int, batch: int, seq: int) -> Goal:
    on = find_shipped_gpu("h100_sxm")
    assert on
    return Goal(gpus, evolve(on, ranks_per_node=8), batch, seq)


@cache
def subject(name: str, gpus: int, batch: int, seq: int) -> tuple[ModelFile, Facts, Goal]:
    file, goal = ModelFile(load(PLANS / name)), goal_of(gpus, batch, seq)
    return file, Facts(resolve(bare_plan(file, goal))), goal


def all_of(found: Space) -> list[Choice]:
    return [found.choice(at) for at in range(len(found))]


TINY: dict[str, object] = {"microbatch": 8, "recompute": "none", "pp": 1}


def test_search_finds_the_best_of_a_small_space() -> None:
    file, facts, goal = subject("tiny_llama.scale", 4, 32, 128)
    every = [price(file, facts, goal, choice) for choice in all_of(space(facts, goal, TINY))]
    assert len(every) > 12
    best = min(it.seconds for it in every if isinstance(it, Priced) and it.fits)
    assert search(file, facts, goal, TINY).fitting[0].seconds == pytest.approx(best, rel=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "gpus", "batch", "seq"),
    [
        ("tiny_llama.scale", 8, 32, 128),
        ("models/tiny_moe.scale", 8, 32, 128),
        ("models/gemma3.scale", 8, 16, 1024),
    ],
)
def test_all_choices_of_a_space_compile(name: str, gpus: int, batch: int, seq: int) -> None:
    file, facts, goal = subject(name, gpus, batch, seq)
    choices = random.Random(0).sample(all_of(space(facts, goal, {})), 12)
    failed = [
        it for it in in_two(partial(price, file, facts, goal), choices) if isinstance(it, Unpriced)
    ]
    assert not failed


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS)
def test_estimates_rank_plans_as_their_programs_do(cell: str) -> None:
    """Of a sample of plans that fit, the best two by estimates have one within 5% of the best
    that is compiled.
    """
    file, facts, goal = subject(*CELLS[cell])
    found = space(facts, goal, {"microbatch": 1})
    found = found.where(np.random.default_rng(1).permutation(len(found)) < 30)
    of = estimate(facts, goal, found, cell_columns(file, facts, goal, found, {}))
    near = [at for at in range(len(found)) if of.bytes[at] < 1.1 * (goal.capacity or 0)][:14]
    priced = in_two(partial(price, file, facts, goal), [found.choice(at) for at in near])
    pairs = [
        (of.seconds[at], it.seconds)
        for at, it in zip(near, priced, strict=True)
        if isinstance(it, Priced)
    ]
    assert len(pairs) > 5
    assert min(exact for _, exact in sorted(pairs)[:2]) <= 1.05 * min(exact for _, exact in pairs)


def test_a_plan_that_is_little_faster_is_first() -> None:
    """Not that which says less: reasons and the table would name a faster one than the first."""
    _, facts, goal = subject("tiny_llama.scale", 4, 32, 128)
    slow, fast = (
        Priced(Choice(dp=4, zero=3, prefetch=prefetch), seconds, {}, 1.0, 0.4, 1, 2)
        for prefetch, seconds in ((1, 3.452), (2, 3.448))
    )
    assert SearchResult(facts, goal, (), (slow, fast), ()).fitting == (fast, slow)


@pytest.mark.long
def test_what_is_kept_is_kept() -> None:
    file, facts, goal = subject("llama3_8b.scale", 64, 256, 8192)
    kept: Mapping[str, object] = {
        "tp": 4,
        "zero": 1,
        "recompute": "full",
        "microbatch": 2,
        "pp": 2,
        "sp": True,
    }
    found = search(file, facts, goal, kept, proved=0)
    assert found.priced
    assert all(it.choice.matches(kept) for it in found.priced)


def test_a_plan_is_proposed_with_its_reasons(tmp_path: Path) -> None:
    file, _, goal = subject("tiny_llama.scale", 4, 32, 128)
    it = find_plans(file, goal, TINY, 2, tmp_path)
    assert [each.proved for each in it.table_plans] == [True, True]
    path = tmp_path / "best.scale"
    path.write_text(it.text)
    program = compile_plan(load(path))
    assert program.degree(tuple(axis.name for axis in program.axes)) == 4
    assert all(
        reason.best == it.table_plans[0] and reason.other != it.table_plans[0]
        for reason in it.reasons
    )
    excluded = [reason for reason in it.reasons if not reason.other.choice.matches(TINY)]
    assert excluded == [reason for reason in it.reasons if "(kept: " in str(reason)]
    assert all(
        it.table_plans[0].seconds <= reason.other.seconds
        for reason in it.reasons
        if reason not in excluded
    )


@pytest.mark.long
def test_reasons_compare_with_other_plans_alone(tmp_path: Path) -> None:
    """Of a plan by 1F1B, the same schedule is no other."""
    file, _, goal = subject("tiny_pipeline.scale", 4, 32, 128)
    it = find_plans(
        file, goal, {"pp": 4, "schedule": "1f1b", "microbatch": 8, "recompute": "none"}, 1, tmp_path
    )
    assert it.reasons
    assert all(reason.other.choice != it.table_plans[0].choice for reason in it.reasons)


def test_layers_that_branches_part_have_the_name_that_a_plan_gives_them() -> None:
    file, facts, goal = subject("deepseek_v3.scale", 2048, 15360, 4096)
    assert (facts.repeats, facts.innermost, facts.layers) == (("layers",), ("layers",), 61)
    halved = plan(
        file, facts, goal, Choice(pp=16, dp=16, ep=8, zero=1, schedule="1f1b", recompute="half")
    )
    assert resolve(halved).train.recompute.names == ("layers_0", "layers_1")


def test_nothing_fits() -> None:
    file, facts, goal = subject("llama3_405b.scale", 8, 64, 8192)
    found = search(file, facts, goal, {})
    assert not found.fitting
    assert found.nearest[0].needs == min(it.needs for it in found.priced)


def test_long_sequences_and_experts_use_their_axes() -> None:
    file, facts, goal = subject("models/qwen3_moe.scale", 16, 16, 32768)
    choices = all_of(space(facts, goal, {"pp": 1, "zero": 1}))
    assert {it.via for it in choices} == {"", "gather", "ring", "ulysses"}
    assert {it.fold for it in choices} == {True, False}
    odd = next(it for it in choices if it.cp == 2 and it.ep == 2 and it.tp == 2 and it.fold)
    text = plan(file, facts, goal, odd).text
    assert "experts over ep, tp" in text
    assert "seq over cp" in text


def test_ranks_share_a_head_of_keys_where_there_are_fewer_heads_than_ranks() -> None:
    """70B has 8 heads of keys and values; over 16 ranks two share one, and all have something
    to do.
    """
    _, facts, goal = subject("llama3_70b.scale", 64, 512, 8192)
    wide = space(facts, goal, {"tp": 16, "pp": 1})
    assert len(wide)
    assert {choice.tp for choice in all_of(wide)} == {16}


def test_tensor_parallelism_leaves_a_node_where_it_is_asked_for() -> None:
    file, facts, goal = subject("llama3_70b.scale", 64, 512, 8192)
    without_tp: tuple[dict[str, object], ...] = ({"pp": 1}, {"ep": 1})
    for kept in without_tp:
        assert not any(choice.tp > 8 for choice in all_of(space(facts, goal, kept)))
    choice = Choice(dp=4, tp=16, microbatch=1, zero=1, recompute="full", sp=True)
    far = plan(file, facts, goal, choice)
    assert "weights_across_nodes = on" in far.text
    compile_plan(far)
    near = Choice(dp=8, tp=8, microbatch=1, zero=1, recompute="full", sp=True)
    assert "weights_across_nodes" not in plan(file, facts, goal, near).text


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_two_processes_give_results_in_order_and_raise_what_is_raised() -> None:
    assert in_two(lambda at: at * at, range(9)) == [at * at for at in range(9)]
    with pytest.raises(ZeroDivisionError):
        in_two(lambda at: 1 // (at - 5), range(9))
    with pytest.raises(ZeroDivisionError):
        in_two(lambda at: 1 // (at - 4), range(9))


def test_what_a_run_looks_at_stays() -> None:
    watch = "watch { copies every 100  replay every 1000 }"
    source = load(PLANS / "llama3_8b.scale")
    file = ModelFile(Source(source.path, f"{source.text}\n{watch}\n"))
    assert file.model(PLANS).endswith(f"\n\n{watch}")


def plan_of_80_gib(seconds: float, needs: float, ends: tuple[float, float], dp: int) -> Priced:
    """A plan on GPUs of 80 GiB."""
    low, high = (round(end * GIB) for end in ends)
    return Priced(
        Choice(dp=dp), seconds, {}, 1.0, 0.4, round(needs * GIB), 80 * GIB, ends=(low, high)
    )


def test_plans_that_may_fit_are_ranked_by_time_beside_the_best_that_fits() -> None:
    """Those that surely do not fit are not in the table, and what is proposed fits."""
    _, facts, goal = subject("tiny_llama.scale", 4, 32, 128)
    fits, slower = plan_of_80_gib(4.0, 70, (68, 74), 1), plan_of_80_gib(5.0, 40, (38, 43), 2)
    close, may, lacks = (
        plan_of_80_gib(3.0, 75, (73, 79), 4),
        plan_of_80_gib(2.0, 82, (79, 87), 8),
        plan_of_80_gib(1.0, 90, (87, 95), 16),
    )
    found = SearchResult(facts, goal, (), (slower, lacks, fits, may, close), ())
    assert [(it.fits, it.may_fit) for it in (fits, close, may, lacks)] == [
        (True, False),
        (False, True),
        (False, True),
        (False, False),
    ]
    assert found.by_time == (may, close, fits, slower)
    assert found.fitting == (fits, slower)
    assert found.first_plans(2) == (may, fits)
    assert found.first_plans(3) == (may, close, fits)
    text = print_plans(Planned(found, 3))
    assert "5  compiled: 2 fit, 2 may fit, 0 proved" in text
    assert "\n1 may not fit: 79.0 to 87.0 GiB of 80; its time cannot be told\n" in text
    assert "\n2 is close to full: 73.0 to 79.0 GiB of 80; its time cannot be told\n" in text
    assert "\n3 is the fastest that fits: the plan below" in text


def test_a_plan_that_may_fit_has_a_time() -> None:
    """With a GPU of little less than the likely memory; with less than the lower end it has
    none.
    """
    file, facts, goal = subject("llama3_8b.scale", 64, 256, 8192)
    choice = Choice(dp=64, zero=3, recompute="full")
    program = make_plan_variant(file, facts, goal, choice).last
    counted = account(program)
    low = need_range(program, counted).low
    rooms = (counted.needs * 2, counted.needs - 1, low - 1)
    sized = [evolve(program, cluster=evolve(program.cluster, memory=room)) for room in rooms]
    plenty, tight, short = (_to_priced(goal, choice, make_variant(it)) for it in sized)
    assert plenty.fits
    assert tight.may_fit
    assert tight.seconds == plenty.seconds
    assert not short.may_fit
    assert short.seconds == inf


@pytest.mark.long
def test_the_search_compiles_a_plan_that_may_fit_if_it_may_be_faster_than_all_that_fit() -> None:
    file, facts, goal = subject("llama3_8b.scale", 64, 256, 8192)
    found = search(file, facts, goal, {}, proved=0)
    first, best = found.by_time[0], found.fitting[0]
    assert first.may_fit
    assert first.seconds < best.seconds
