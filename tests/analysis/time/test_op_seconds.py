"""The seconds of ops where they run add up to those of the step."""

from pathlib import Path

import pytest

from scalec.compiler.analysis.hardware import hardware
from scalec.compiler.analysis.time.op_rows import op_rows
from scalec.compiler.analysis.time.op_seconds import op_seconds
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.ir import MICROBATCHES
from scalec.compiler.passes import compile_plan
from scalec.compiler.syntax.limits import load

PLANS = Path(__file__).parents[3] / "plans"


@pytest.mark.parametrize("name", ["gpt2_124m", "llama3_8b"])
def test_ops_add_up_to_the_step(name: str) -> None:
    program = compile_plan(load(PLANS / f"{name}.scale"))
    on = hardware(program)
    assert on
    took, step = op_seconds(program, on), step_time(program, on)
    assert took.microbatch * program.size(MICROBATCHES) + took.once == pytest.approx(step.seconds)
    ops = sum(row.count * took.ops.get(row.name, 0.0) for row in op_rows(program, on) if row.where != "step")
    assert ops == pytest.approx(step.seconds - took.once, rel=0.05)
