"""`recompute = auto(memory = …)` in emitted programs: the same numbers, and the memory that the
account says.
"""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from helpers.measured_memory import measure, peak
from helpers.memory_plans import PLANS, SP, compiled
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.oracle.reference import Step
from helpers.programs import load_program
from helpers.readback_plans import LLAMA, SKIP, plan
from scalec.compiler.analysis.expert_loads import with_load
from scalec.compiler.analysis.memory import account
from scalec.compiler.analysis.memory.account import accounts_of
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

from .test_numbers import compare

ALONE = {"llama": (LLAMA, ""), "fused": (LLAMA, "kernels = triton"), "dropout": (SKIP, "")}
SHARED = {
    "shared weights": replace(SP, state="zero 3 over dp", optimizer="adamw"),
    "stages with experts": Case(
        pp=2, ep=2, model="two", experts="ep", microbatches=2, state="zero 1 over ep"
    ),
}


def _bound(none: str, full: str, part: float) -> int:
    """A part of the way from what a rank needs if layers are recomputed to what it needs if
    nothing is.
    """
    most, fewest = (
        account(compile_plan(Source(str(PLANS / "plan.scale"), text))).total
        for text in (none, full)
    )
    return round(fewest + part * (most - fewest))


def _plan(name: str, recompute: str) -> str:
    body, options = ALONE[name]
    return plan(body, "", "", f"precision = fp64  recompute = {recompute}  {options}")


def _step(text: str, folder: Path) -> Step:
    module = load_program(text, folder)
    sizes = [
        (module.PLAN.global_batch, module.PLAN.seq)[: len(given.dims)]
        for given in module.PLAN.inputs.values()
    ]
    inputs = tuple(torch.arange(prod(size)).view(size) % (7 + i) for i, size in enumerate(sizes))
    (step,) = harness.run(Case(), module, harness.initial(Case(), module, seed=5), [inputs], 0.1)
    return step


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALONE)
def test_what_is_recomputed_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    bound = _bound(_plan(name, "none"), _plan(name, "full"), 0.1)
    text = _plan(name, f"auto(memory = {bound}B)")
    assert len(compile_plan(Source("plan.scale", text)).recomputed) > 4
    kept, again = _step(_plan(name, "none"), tmp_path / "none"), _step(text, tmp_path / "again")
    assert kept.loss == again.loss
    assert all(torch.equal(kept.gradients[key], again.gradients[key]) for key in kept.gradients)
    assert any(gradient.any() for gradient in kept.gradients.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SHARED)
def test_several_ranks_compute_what_one_does_and_hold_what_is_counted(
    name: str, tmp_path: Path
) -> None:
    case = SHARED[name]
    bound = _bound(plan_text(case), plan_text(replace(case, recompute="full")), 0.2)
    case = replace(case, recompute=f"auto(memory = {bound}B)")
    module, program = compiled(plan_text(case), tmp_path)
    assert len(program.recomputed) > 4
    compare(case, module, 1)
    if not program.pipeline:
        (it,) = accounts_of(with_load(program, 1))
        assert all(
            sum(rank.kept.values()) == it.activations
            for rank in measure(module, module.PLAN.global_batch)
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", [0.7, 0.1])
def test_the_fullest_moment_is_within_the_bound(part: float, tmp_path: Path) -> None:
    """As torch's profiler sees it, within 3%."""
    train = "train { seq = 256  global_batch = 16  microbatch = 4  recompute = WORD }"
    text = (
        f'use "tiny_llama.scale" {{ dims {{ vocab = 64  layers = 4 }}  {train} }}\nmesh {{ dp'
        f" = 1  tp = 1 }}\n"
    )
    bound = _bound(text.replace("WORD", "none"), text.replace("WORD", "full"), part)
    module, program = compiled(text.replace("WORD", f"auto(memory = {bound}B)"), tmp_path)
    it = account(program)
    assert program.recomputed
    assert it.total <= bound
    assert it.peak.bytes == pytest.approx(peak(module, 16), rel=0.03), it.peak
