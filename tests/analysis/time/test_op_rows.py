"""The seconds of ops where they run add up to those of the step."""

from pathlib import Path

import pytest

from scalec.compiler.analysis.hardware import hardware
from scalec.compiler.analysis.time.op_rows import op_rows, op_seconds
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.ir import MICROBATCHES
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[3] / "plans"


@pytest.mark.parametrize("name", ["gpt2_124m", "llama3_8b"])
def test_ops_add_up_to_the_step(name: str) -> None:
    program = compile_plan(load(PLANS / f"{name}.scale"))
    on = hardware(program)
    assert on
    took, step = op_seconds(program, on), step_time(program, on)
    assert took.microbatch * program.size(MICROBATCHES) + took.once == pytest.approx(step.seconds)
    ops = sum(
        row.count * took.ops.get(row.name, 0.0)
        for row in op_rows(program, on)
        if row.where != "step"
    )
    assert ops == pytest.approx(step.seconds - took.once, rel=0.05)


NESTED = """model nested(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 16  inner = 16  layers = 3  blocks = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers as i {
    repeat blocks { x = x + rmsnorm(x, n1[hidden], 1e-5) }
    if i < 1 {
      repeat blocks { x = x + x @ w1[hidden -> inner] @ v1[inner -> hidden] }
    } else {
      x = x + x @ w2[hidden -> inner] @ v2[inner -> hidden]
      repeat blocks { x = x + x @ w3[hidden -> inner] @ v3[inner -> hidden] }
    }
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 2 }
shard { batch over dp }
state { zero 1 over dp  bucket = 1KiB }
train {
  seq = 8  global_batch = 2  microbatch = 1  steps = 1
  optimizer adamw { lr = 1e-3 }
  data text { files = [python_stdlib] }
}
cluster { gpu = h100_sxm }
"""
"""Repeats of one dim in repeats of two, whose parameters are gathered in stacks of 2 and of 4
layers.
"""


def test_repeats_in_repeats_wait_for_their_own_parameters() -> None:
    program = compile_plan(Source("nested.scale", NESTED))
    on = hardware(program)
    assert on
    took = op_seconds(program, on)
    assert took.microbatch * program.size(MICROBATCHES) + took.once == pytest.approx(
        step_time(program, on).seconds
    )
