"""The peak of a rank with experts, with equal loads and where all tokens choose its experts,
within 3%.
"""

from math import inf
from pathlib import Path

import pytest

from helpers.measured_memory import peak, peaks, peaks_of_ranks
from helpers.memory_plans import compiled
from scalec.compiler.analysis.expert_loads import with_load
from scalec.compiler.analysis.memory.account import accounts_of
from scalec.compiler.ir import Program

PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = 64  hidden = 128  experts = 8  expert_ffn = 256  layers = {layers} }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    y = rmsnorm(x, norm[hidden], 1e-5)
    route y to experts by top(y @ router[hidden -> experts], {k}{options}) {{
      y = (silu(y @ e_gate[hidden -> expert_ffn]) * (y @ e_up[hidden -> expert_ffn])) @ e_down[expert_ffn -> hidden]
    }}
    x = x + y
  }}
  loss = cross_entropy(rmsnorm(x, norm_f[hidden], 1e-5) @ head[hidden -> vocab], labels)
}}
mesh {{ {mesh} }}
shard {{ {rules} }}
train {{
  seq = 128  global_batch = {batch}  microbatch = 2  steps = 1  {train}
  optimizer sgd {{ lr = 0.1 }}
  data text {{ files = [python_stdlib] }}
}}
"""
FOLDINGS = {
    "an axis": ("dp = 2", "experts over dp  batch over dp"),
    "two axes": ("dp = 2  tp = 2", "experts over dp, tp  batch over dp  seq over tp"),
    "the same tokens": ("tp = 2", "experts over tp"),
}
LOADS = {"even": 1.0, "to the first": inf}


def text(folding: str, train: str = "", options: str = "", layers: int = 3, k: int = 2) -> str:
    mesh, rules = FOLDINGS[folding]
    batch = 4 if "dp" in mesh else 2
    return PLAN.format(
        mesh=mesh, rules=rules, train=train, options=options, layers=layers, k=k, batch=batch
    )


def accounted(program: Program, load: str) -> int:
    (it,) = accounts_of(with_load(program, LOADS[load]))
    return it.peak.bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "train",
    [
        "",
        "precision = bf16",
        "recompute = full",
        "recompute = selective(dispatch)",
        "kernels = triton",
    ],
)
@pytest.mark.parametrize("folding", FOLDINGS)
def test_a_rank(folding: str, train: str, load: str, tmp_path: Path) -> None:
    module, program = compiled(text(folding, train), tmp_path)
    measured = peak(module, module.PLAN.global_batch, to_first=load != "even")
    assert measured == pytest.approx(accounted(program, load), rel=0.03)


@pytest.mark.sample(1)
@pytest.mark.parametrize("load", LOADS)
def test_a_capacity_bounds_the_worst(load: str, tmp_path: Path) -> None:
    """An expert gets 1.5 times an equal share at most, so that the worst is not four times one."""
    module, program = compiled(text("an axis", options=", capacity=1.5"), tmp_path)
    measured = peak(module, module.PLAN.global_batch, to_first=load != "even")
    assert measured <= 1.03 * accounted(program, load)
    assert accounted(program, "to the first") < accounted(
        compiled(text("an axis"), tmp_path)[1], "to the first"
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("load", LOADS)
def test_ranks_that_exchange(load: str, tmp_path: Path) -> None:
    """So wide experts that what gloo holds for a moment is little; where all go to the first,
    the other has less.
    """
    wide = (
        text("an axis", layers=12)
        .replace("hidden = 128", "hidden = 64")
        .replace("ffn = 256", "ffn = 1024")
    )
    module, program = compiled(wide, tmp_path)
    first, second = peaks_of_ranks(module, module.PLAN.global_batch, to_first=load != "even")
    assert max(first, second) == pytest.approx(accounted(program, load), rel=0.03)
    assert (second < first / 3) == (load != "even")


@pytest.mark.sample(1)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipev", "interleaved_1f1b(chunks=2)"])
def test_ranks_of_a_pipeline(schedule: str, load: str, tmp_path: Path) -> None:
    """Each has the first experts of its layers."""
    plan = text("an axis", layers=4).replace("mesh { dp = 2 }", "mesh { pp = 2  dp = 2 }")
    plan = plan.replace("shard {", f"pipeline {{ schedule = {schedule} }}\nshard {{ layers over pp")
    module, program = compiled(plan.replace("global_batch = 4", "global_batch = 16"), tmp_path)
    counted = [it.peak.bytes for it in accounts_of(with_load(program, LOADS[load]))]
    assert peaks(module, 16, to_first=load != "even") == pytest.approx(counted, rel=0.03)
