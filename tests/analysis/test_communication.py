"""The account of a plan small enough to be counted by hand."""

from pathlib import Path

import pytest

import scalec.plans
from helpers.programs import make_program
from scalec.compiler.analysis.collective import Collective
from scalec.compiler.analysis.communication import collectives, parameter_count
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(scalec.plans.__path__[0])

# One weight of 6 × 4 and one norm; on each rank 2 of the 4 sequences of a microbatch, 10 tokens
# each, 3 columns of 6.
PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 6  hidden = 4  layers = 5 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + rmsnorm(x, scale[hidden], 1e-5)
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 2  tp = 2 }
shard {
  batch over dp
  vocab over tp
  seq   over tp
}
train {
  seq = 10  global_batch = 12  microbatch = 2  steps = 1  precision = bf16
  optimizer sgd { lr = 0.1 }
  data text { files = ["a"] }
}
"""


def row(it: Collective) -> tuple[object, ...]:
    return it.op, "*".join(it.axes), it.dtype, it.shape, it.count, it.line


def rows(where: str) -> list[tuple[object, ...]]:
    return [row(it) for it in collectives(make_program(PLAN)) if it.where == where]


def test_forward() -> None:
    assert rows("forward") == [
        ("reduce_scatter", "tp", "bf16", (10, 2, 4), 3, "tiny.scale:5"),
        ("all_gather", "tp", "bf16", (5, 2, 4), 3, "tiny.scale:8"),
        ("all_reduce", "tp", "f32", (10, 2), 3, "tiny.scale:8"),
        ("all_reduce", "tp", "f32", (10, 2), 3, "tiny.scale:8"),
        ("all_reduce", "tp", "f32", (10, 2), 3, "tiny.scale:8"),
    ]


def test_backward_is_conjugate() -> None:
    assert rows("backward") == [
        ("reduce_scatter", "tp", "bf16", (10, 2, 4), 3, "tiny.scale:8"),
        ("all_gather", "tp", "bf16", (5, 2, 4), 3, "tiny.scale:5"),
    ]


def test_the_step_counts_tokens_sums_the_loss_and_reduces_each_bucket_once() -> None:
    weights, norms = 2 * 3 * 4, 5 * 4
    assert sorted(rows("step"), key=str) == sorted(
        [
            ("all_reduce", "dp", "i64", (), 1, "tiny.scale:1"),
            ("all_reduce", "dp", "f32", (), 1, "tiny.scale:1"),
            ("all_reduce", "dp", "f32", (weights,), 1, "tiny.scale:1"),
            ("all_reduce", "dp*tp", "f32", (norms,), 1, "tiny.scale:1"),
            ("all_reduce", "tp", "f32", (), 1, "tiny.scale:1"),
        ],
        key=str,
    )


def test_sizes() -> None:
    scatter = next(it for it in collectives(make_program(PLAN)) if it.op == "reduce_scatter")
    assert (scatter.elements, scatter.bytes, scatter.ranks) == (10 * 2 * 4, 10 * 2 * 4 * 2, 2)
    norms = next(it for it in collectives(make_program(PLAN)) if it.axes == ("dp", "tp"))
    assert (norms.elements, norms.bytes, norms.ranks) == (20, 80, 4)


def test_one_maximum() -> None:
    assert [it.line for it in collectives(make_program(PLAN)) if it.maximum] == ["tiny.scale:8"]


def test_inside_a_repeat_each_iteration_counts() -> None:
    tp_only = PLAN.replace("  seq   over tp\n", "").replace(
        "rmsnorm(x, scale[hidden], 1e-5)", "(x @ up[hidden -> vocab]) @ down[vocab -> hidden]"
    )
    inside = [it for it in collectives(make_program(tp_only)) if it.line == "tiny.scale:6"]
    assert [(it.op, it.count, it.where, it.loops) for it in inside] == [
        ("all_reduce", 3 * 5, "forward", ("microbatches", "layers")),
        ("all_reduce", 3 * 5, "backward", ("microbatches", "layers.1")),
    ]


def test_loops_over_one_dim_are_told_apart() -> None:
    lines = "x = x + (x @ up{n}[hidden -> vocab]) @ down{n}[vocab -> hidden]"
    repeats = "\n".join(f"repeat layers {{ {lines.replace('{n}', str(n))} }}" for n in (1, 2))
    before, after = PLAN.replace("  seq   over tp\n", "").split(
        "  repeat layers {\n    x = x + rmsnorm(x, scale[hidden], 1e-5)\n  }"
    )
    found = collectives(make_program(f"{before}{repeats}{after}"))
    assert list(dict.fromkeys(loop for it in found for loop in it.loops)) == [
        "microbatches",
        "layers",
        "layers.1",
        "layers.2",
        "layers.3",
    ]


def test_one_rank_communicates_nothing() -> None:
    assert collectives(make_program(PLAN.replace("dp = 2  tp = 2", "dp = 1  tp = 1"))) == ()


def test_a_program_without_a_step_has_no_account() -> None:
    with pytest.raises(AssertionError, match="propagate"):
        collectives(compile_plan(Source("tiny.scale", PLAN), "propagate"))


def test_parameters_count_every_layer_once() -> None:
    assert parameter_count(make_program(PLAN)) == 2 * 6 * 4 + 5 * 4


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_parameters_of_llama_3(plan: str, count: int) -> None:
    assert parameter_count(compile_plan(load(PLANS / f"{plan}.scale"), "resolve")) == count
